"""`finetune export`: write a checkpoint as a file for other programs, verified against the network."""

import json
import sys
from pathlib import Path
from typing import Any

from finetune.commands.export_target import put_in_place, workplace
from finetune.inference.end_to_end import EndToEnd
from finetune.inference.export_about import about
from finetune.inference.export_check import compare, images_to_verify, load_exported
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
from finetune.system.files import check_target
from finetune.system.messages import WrongUsage
from finetune.system.progress import track

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
    with workplace() as folder:
        if is_timm:
            facts, message = _write_timm(predictor, checkpoint, options, folder)
        else:
            facts, message = _write_file(predictor, checkpoint, options, folder / target.name)
        (folder / description.name).write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
        files = {path: folder / path.name for path in places}
        num_bytes = sum(file.stat().st_size for file in files.values())
        put_in_place(target, files)
    use = f"timm.create_model('local-dir:{target}', pretrained=True)"
    hint = f"for {use}" if is_timm else f"and {description.name} about it"
    print(f"{target} ({num_bytes / 1e6:.1f} MB), {hint}")
    print(message)
    return target


def _write_file(
    predictor: Predictor, checkpoint: dict[str, Any], options: ExportSettings, file: Path
) -> tuple[dict[str, Any], str]:
    """Write and verify an .onnx or a .safetensors. Return its description and the result in a line."""
    images = images_to_verify(options.verify_on or options.quantize)
    module = EndToEnd(predictor.model, predictor.calibration).eval()
    suffix, write = WRITERS[options.format]
    write(module, predictor.image_size, packed(checkpoint), file)
    agreement = compare(predictor, load_exported(file), images)
    agreement.check(f"{suffix} file")
    if not options.quantize:
        facts = about(predictor, checkpoint, options.format, {"verified": agreement})
        return facts, agreement.describe("verified against", predictor.label_kind)
    _quantize(predictor, file, options.quantize)
    of_int8 = compare(predictor, load_exported(file), images)
    agreements = {"verified_before_int8": agreement, "int8": of_int8}
    facts = about(predictor, checkpoint, options.format, agreements)
    return facts, of_int8.describe("int8, compared with", predictor.label_kind)


def _quantize(predictor: Predictor, file: Path, place: str) -> None:
    """Replace a float file by one in int8, calibrated on images of a place."""
    from finetune.inference.quantize import quantize

    readers = images_to_verify(place, _NUM_CALIBRATED).readers
    source = file.with_name(f"float.{file.name}")
    file.rename(source)
    tracked = track(readers, len(readers), "calibrating int8")
    quantize(source, file, (predictor.prepare(read())[None] for read in tracked))


def _write_timm(
    predictor: Predictor, checkpoint: dict[str, Any], options: ExportSettings, folder: Path
) -> tuple[dict[str, Any], str]:
    """Write and verify a folder in timm's layout. Return its description and the result in a line."""
    write_timm_folder(predictor, checkpoint, folder)
    run = load_timm_folder(folder, predictor.label_kind)
    agreement = compare(predictor, run, images_to_verify(options.verify_on))
    agreement.check("timm folder")
    card = _card(options.ckpt_path, checkpoint)
    (folder / README).write_text(readme(predictor, card), "utf-8")
    facts = about(predictor, checkpoint, "timm", {"verified": agreement})
    return facts, agreement.describe("verified against", predictor.label_kind)


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
