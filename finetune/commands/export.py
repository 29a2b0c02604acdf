"""`finetune export`: write a checkpoint as a file for other programs, verified against the network."""

import sys
from pathlib import Path
from typing import Any

from finetune.commands.export_target import (
    put_file_in_place,
    put_folder_in_place,
    workplace,
    write_description,
)
from finetune.commands.export_verification import (
    check_agreement,
    describe_agreement,
    describe_int8,
    images_to_verify,
)
from finetune.inference.end_to_end import EndToEnd
from finetune.inference.export_about import about
from finetune.inference.export_check import compare_prepared, load_exported
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
    if options.format == "timm":
        return _export_timm(options.ckpt_path, checkpoint, options.output, options.verify_on)
    target = _target_file(options.ckpt_path, options.format, options.output, options.quantize)
    description_path = target.with_name(f"{target.name}.json")
    for path in (target, description_path):
        check_target(path, "--out")
    predictor = Predictor(options.ckpt_path, checkpoint=checkpoint)
    images = images_to_verify(options.verify_on or options.quantize)
    print(
        f"writing {predictor.network_name} as {target.name}, which takes some seconds",
        file=sys.stderr,
        flush=True,
    )
    with workplace() as folder:
        file = folder / target.name
        module = EndToEnd(predictor.model, predictor.calibration).eval()
        suffix, write = WRITERS[options.format]
        write(module, predictor.image_size, packed(checkpoint), file)
        prepared = images.prepared(predictor)
        agreement = compare_prepared(predictor, load_exported(file), prepared)
        check_agreement(agreement, f"{suffix} file", images.description)
        agreements = {"verified": agreement}
        message = describe_agreement(agreement, images.description, predictor.label_kind)
        if options.quantize:
            file = _quantized(predictor, file, options.quantize)
            of_int8 = compare_prepared(predictor, load_exported(file), prepared)
            agreements = {"verified_before_int8": agreement, "int8": of_int8}
            message = describe_int8(of_int8, images.description, predictor.label_kind)
        facts = about(predictor, checkpoint, options.format, agreements)
        put_file_in_place(file, facts, target, description_path)
    megabytes = target.stat().st_size / 1e6
    print(f"{target} ({megabytes:.1f} MB), and {description_path.name} about it")
    print(message)
    return target


def _quantized(predictor: Predictor, source: Path, place: str) -> Path:
    """Return the file in int8, calibrated on images of a place, next to the float file."""
    from finetune.inference.quantize import quantize

    readers = images_to_verify(place, _NUM_CALIBRATED).readers
    target = source.with_name(f"int8.{source.name}")
    tracked = track(readers, len(readers), "calibrating int8")
    quantize(source, target, (predictor.prepare(read())[None] for read in tracked))
    return target


def _target_file(ckpt_path: str, format: str, output: str | None, quantize: str | None) -> Path:
    """Return the file to write: `output`, or one next to the checkpoint.

    Raises:
        WrongUsage: The suffix of `output` is not that of the format.
    """
    suffix, _ = WRITERS[format]
    if not output:
        return Path(ckpt_path).with_suffix(f".int8{suffix}" if quantize else suffix)
    target = Path(output)
    if target.suffix != suffix:
        others = [name for name, (other, _) in WRITERS.items() if other == target.suffix]
        hint = f"; --format {others[0]} writes a {target.suffix}" if others else ""
        raise WrongUsage(f"--out {output}: a file of --format {format} is a {suffix}{hint}")
    return target


def _export_timm(
    ckpt_path: str, checkpoint: dict[str, Any], output: str | None, verify_on: str | None
) -> Path:
    """Write a folder in timm's layout; see `export`."""
    target = Path(output) if output else Path(ckpt_path).with_suffix(".timm")
    if target.exists() and not target.is_dir():
        raise WrongUsage(f"--out {target}: --format timm writes a folder, and this is a file")
    has_others = target.is_dir() and any(not path.name.startswith(".") for path in target.iterdir())
    if has_others and not (target / DESCRIPTION).is_file():
        raise WrongUsage(f"--out {target} has files of others: name a new folder")
    for name in (DESCRIPTION, README, *TIMM_FILES):
        check_target(target / name, "--out")
    predictor = Predictor(ckpt_path, checkpoint=checkpoint)
    check_supported(predictor)
    images = images_to_verify(verify_on)
    with workplace() as folder:
        write_timm_folder(predictor, checkpoint, folder)
        run = load_timm_folder(folder, predictor.label_kind)
        agreement = compare_prepared(predictor, run, images.prepared(predictor))
        check_agreement(agreement, "timm folder", images.description)
        facts = about(predictor, checkpoint, "timm", {"verified": agreement})
        write_description(folder / DESCRIPTION, facts)
        (folder / README).write_text(readme(predictor, _card(ckpt_path, checkpoint)), "utf-8")
        num_bytes = sum(file.stat().st_size for file in folder.iterdir())
        put_folder_in_place(folder, target, (README, DESCRIPTION, *TIMM_FILES))
    print(
        f"{target} ({num_bytes / 1e6:.1f} MB) for timm.create_model('local-dir:{target}', pretrained=True)"
    )
    print(describe_agreement(agreement, images.description, predictor.label_kind))
    return target


def _card(ckpt_path: str, checkpoint: dict[str, Any]) -> str:
    """Return the model card of the checkpoint's run, without folders of this machine; "" if it is not in a run."""
    run = Path(ckpt_path).resolve().parent.parent
    if not RunDir(run).is_run:
        return ""
    record = read_run(run)
    return model_card(record, record.data_set, licence_of(checkpoint))
