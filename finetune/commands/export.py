"""`finetune export`: write a checkpoint as a file for other programs, verified against the network."""

import errno
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from finetune.inference.end_to_end import EndToEnd
from finetune.inference.export_about import about
from finetune.inference.export_check import Agreement, compare, images_to_verify, load_exported
from finetune.inference.exporters import WRITERS
from finetune.inference.predictor import Predictor
from finetune.inference.timm_folder import (
    DESCRIPTION,
    README,
    TIMM_FILES,
    check_supported,
    load_timm_folder,
    readme,
    write_timm_folder,
)
from finetune.reports.model_card import model_card
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.exported_files import ExportedCheckpoint, licence_of, packed
from finetune.runs.record import read_run
from finetune.runs.run_dir import RunDir
from finetune.settings.all_commands import ExportSettings
from finetune.system.files import check_target, one_at_a_time, replacing, unfinished
from finetune.system.messages import WrongUsage

_NUM_CALIBRATED = 200  # images for int8


def export(options: ExportSettings) -> Path:
    """Write a checkpoint as a file for other programs that predicts as the checkpoint does.

    An .onnx takes images of the network's size, (N, h, w, 3) uint8 RGB, and returns probabilities (N, K): normalisation
    and temperature are inside. A .safetensors has the weights. A .json next to it describes it. For timm, a folder is
    written that `timm.create_model` and the Hugging Face hub can read. The result is discarded if a probability differs
    from the checkpoint's by more than 1e-4, or if a class differs.

    Returns:
        The file or folder.
    """
    checkpoint = read_checkpoint(options.ckpt_path)
    if isinstance(checkpoint, ExportedCheckpoint):
        raise WrongUsage(
            f"{options.ckpt_path} is an exported file: use the checkpoint from which it was exported"
        )
    if options.quantize and options.format != "onnx":
        raise WrongUsage(f"--quantize makes an .onnx, not --format {options.format}")
    is_timm = options.format == "timm"
    target = _target_folder(options) if is_timm else _target_file(options)
    description = target / DESCRIPTION if is_timm else target.with_name(f"{target.name}.json")
    places = [target / name for name in (README, DESCRIPTION, *TIMM_FILES)]
    if not is_timm:
        places = [target, description]
    for path in places:
        check_target(path, "--out")
    predictor = Predictor(options.ckpt_path, checkpoint=checkpoint)
    if is_timm:
        check_supported(predictor)
    print(
        f"writing {predictor.network_name} as {target.name}, which takes some seconds",
        file=sys.stderr,
        flush=True,
    )
    with _workplace() as folder:
        agreements = _write(
            predictor, checkpoint, options, folder if is_timm else folder / target.name
        )
        if is_timm:
            card = _card(options.ckpt_path, checkpoint)
            (folder / README).write_text(readme(predictor, card), "utf-8")
        facts = about(predictor, checkpoint, options.format, agreements)
        (folder / description.name).write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
        files = {path: folder / path.name for path in places}
        num_bytes = sum(file.stat().st_size for file in files.values())
        put_in_place(target, files)
    use = f"timm.create_model('local-dir:{target}', pretrained=True)"
    hint = f"for {use}" if is_timm else f"and {description.name} about it"
    print(f"{target} ({num_bytes / 1e6:.1f} MB), {hint}")
    compared = "int8, compared with" if options.quantize else "verified against"
    print([*agreements.values()][-1].describe(compared, predictor.label_kind))
    return target


def _write(
    predictor: Predictor, checkpoint: dict[str, Any], options: ExportSettings, place: Path
) -> dict[str, Agreement]:
    """Write a file, or timm's files into a folder, and compare it with the checkpoint.

    Returns:
        The results of the comparisons by their key in the description, that of the final file last.
    """
    images, what = images_to_verify(predictor, options.verify_on or options.quantize)
    if options.format == "timm":
        write_timm_folder(predictor, checkpoint, place)
        run = load_timm_folder(place, predictor.label_kind)
    else:
        module = EndToEnd(predictor.model, predictor.calibration).eval()
        _, write = WRITERS[options.format]
        write(module, predictor.image_size, packed(checkpoint), place)
        run = load_exported(place)
    agreement = compare(predictor, run, images, what)
    agreement.check()
    if not options.quantize:
        return {"verified": agreement}
    from finetune.inference.quantize import quantize

    of_ranges, _ = images_to_verify(predictor, options.quantize, _NUM_CALIBRATED)
    floats = place.rename(place.with_name(f"float.{place.name}"))
    quantize(floats, place, (image[None] for image in of_ranges))
    of_int8 = compare(predictor, load_exported(place), images, what)
    return {"verified_before_int8": agreement, "int8": of_int8}


def _target_file(options: ExportSettings) -> Path:
    """Return the file to write: `output`, or one next to the checkpoint.

    Raises:
        WrongUsage: The suffix of `output` is not that of the format.
    """
    suffix, _ = WRITERS[options.format]
    if not options.output:
        return Path(options.ckpt_path).with_suffix(f".int8{suffix}" if options.quantize else suffix)
    target = Path(options.output)
    if target.suffix != suffix:
        others = [name for name, (other, _) in WRITERS.items() if other == target.suffix]
        hint = f"; --format {others[0]} writes a {target.suffix}" if others else ""
        raise WrongUsage(f"--out {target}: a file of --format {options.format} is a {suffix}{hint}")
    return target


def _target_folder(options: ExportSettings) -> Path:
    """Return the folder to write for timm: `output`, or one next to the checkpoint.

    Raises:
        WrongUsage: It is a file, or has files of others.
    """
    target = Path(options.output or Path(options.ckpt_path).with_suffix(".timm"))
    if target.exists() and not target.is_dir():
        raise WrongUsage(f"--out {target}: --format timm writes a folder, and this is a file")
    has_others = target.is_dir() and any(not path.name.startswith(".") for path in target.iterdir())
    if has_others and not (target / DESCRIPTION).is_file():
        raise WrongUsage(f"--out {target} has files of others: name a new folder")
    return target


def _card(ckpt_path: str, checkpoint: dict[str, Any]) -> str:
    """Return the model card of the checkpoint's run, without folders of this machine; "" if it is not in a run."""
    run = Path(ckpt_path).resolve().parent.parent
    if not RunDir(run).is_run:
        return ""
    record = read_run(run)
    return model_card(record, record.data_set, licence_of(checkpoint))


@contextmanager
def _workplace() -> Iterator[Path]:
    """Yield a temporary folder for files that are not verified yet. If the process is killed, the system clears it.

    Raises:
        OSError: The disk is full.
    """
    with tempfile.TemporaryDirectory(prefix="finetune_export_") as folder:
        try:
            yield Path(folder)
        except OSError as error:
            if error.errno == errno.ENOSPC and not error.filename:
                place = (
                    f"{tempfile.gettempdir()}, the folder for temporary files (TMPDIR sets another)"
                )
                raise OSError(error.errno, error.strerror, place) from error
            raise


def put_in_place(target: Path, files: dict[Path, Path]) -> None:
    """Write the files of an export atomically, so that all are of one export even if others run in parallel.

    Args:
        target: The file or folder of the export.
        files: Each place, and the file that is copied to it. The last one is missing until the end: no program can load
            a part, and none reads the description of another file.
    """
    with one_at_a_time(target), ExitStack() as replaced:
        for path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            for leftover in unfinished(path):  # of a process that was killed
                leftover.unlink(missing_ok=True)
        for path, source in reversed(files.items()):  # the first one is replaced first
            temporary = replaced.enter_context(replacing(path))
            try:
                shutil.copyfile(source, temporary)
            except OSError as error:  # it names the source
                raise OSError(error.errno, error.strerror, str(path)) from error
        [*_, last] = files
        last.resolve().unlink(missing_ok=True)
