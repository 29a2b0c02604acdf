"""`finetune export`: write a checkpoint as a file for other programs, verified against the network."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from finetune.commands.export_target import (
    files_of,
    put_file_in_place,
    put_folder_in_place,
    workplace,
    write_description,
)
from finetune.commands.export_verification import (
    VerificationImages,
    check_agreement,
    describe_agreement,
    images_to_verify,
    same_answers,
)
from finetune.commands.int8_data import int8_data
from finetune.data.datamodule import ImageDataModule
from finetune.data.samplers import ESTIMATE, draw_indices
from finetune.data.transforms import CROP_SHARE
from finetune.inference.coreml_package import (
    COREML_FILES,
    exported_program,
    import_coremltools,
    runner,
    write_package,
)
from finetune.inference.end_to_end import EndToEnd
from finetune.inference.export_about import about
from finetune.inference.export_check import (
    Agreement,
    PredictionFunction,
    compare_any_size,
    compare_prepared,
    load_exported,
)
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
from finetune.runs.checkpoint_io import read_checkpoint
from finetune.runs.exported_files import ExportedCheckpoint, InputSize, licence_of, packed
from finetune.runs.headline import data_set
from finetune.runs.model_card import model_card
from finetune.runs.record import read_run
from finetune.runs.run_search import is_run_folder
from finetune.system.files import check_target
from finetune.system.messages import WrongUsage

# images for int8: calibration, test
_NUM_CALIBRATED = 200
_MAX_TESTED = 2000


def export(
    ckpt_path: str,
    format: Literal["onnx", "openvino", "torch", "safetensors", "coreml", "timm"] = "onnx",
    output: str | None = None,
    input: InputSize = "network_size",
    verify_on: str | None = None,
    quantize: Literal["int8"] | None = None,
    root: str | None = None,
) -> Path:
    """Write a checkpoint as a file for other programs that predicts as the checkpoint does.

    An .onnx, .xml or .pt2 takes images of the network's size, (N, h, w, 3) uint8 RGB, and returns probabilities (N, K):
    normalisation and temperature are inside. A .safetensors has the weights. A .json next to it describes it. For timm,
    a folder is written that `timm.create_model` and the Hugging Face hub can read. The result is discarded if a
    probability differs from the checkpoint's by more than 1e-4, or if a class differs. A package of Core ML is not run
    here: the program that is converted is verified, and the classes and the normalisation in the package.

    Args:
        ckpt_path: A checkpoint of `finetune fit`.
        format: onnx for onnxruntime and most others, openvino for an .xml with its weights in a .bin, torch for
            `torch.export.load`, safetensors for the weights alone, coreml for an .mlpackage, which Apple's systems run,
            timm for a folder in timm's layout.
        output: The file or folder; null for one next to the checkpoint.
        input: any_size for an .onnx that takes images (N, H, W, 3) of any size and prepares them itself, as
            evaluation does; network_size for one that takes prepared images.
        verify_on: Image, folder, glob or text file with a path on each line. At most 64 images are compared;
            synthetic images by default.
        quantize: int8 for an .onnx of a quarter of the size, calibrated on 200 training images and compared on at
            most 2,000 test images. It is discarded if it loses more than a point of accuracy, or is not faster.
        root: Folder of the data set for int8; null for that of the checkpoint's run.

    Returns:
        The file or folder.
    """
    checkpoint = read_trained(ckpt_path)
    _check_options(format, input, quantize, root)
    if format == "timm":
        return _export_timm(ckpt_path, checkpoint, output, verify_on)
    if format == "coreml":
        return _export_coreml(ckpt_path, checkpoint, output, verify_on)
    if input == "any_size":
        _check_bilinear(checkpoint)
    target = _target_file(ckpt_path, format, output, input, quantize)
    description_path = target.with_name(f"{target.name}.json")
    for path in (*files_of(target), description_path):
        check_target(path, "--out")
    predictor = Predictor(ckpt_path, checkpoint=checkpoint)
    data = int8_data(checkpoint, root, predictor.class_names) if quantize else None
    images = images_to_verify(verify_on)
    print(
        f"writing {predictor.network_name} as {target.name}, which takes some seconds",
        file=sys.stderr,
        flush=True,
    )
    with workplace() as folder:
        file = folder / target.name
        module = EndToEnd(predictor.model, predictor.calibration).eval()
        suffix, write = WRITERS[format]
        write(module, predictor.image_size, packed(checkpoint, input), file)
        agreement = compare_prepared(predictor, load_exported(file), images.prepared(predictor))
        verified_on = images.description
        check_agreement(agreement, f"{suffix} file", verified_on)
        agreements = {"verified" if data is None else "verified_before_int8": agreement}
        message = ""
        quantized = dict[str, Any]()
        if data is not None:
            file, quantized, message = _quantize(predictor, file, data)
        if input == "any_size":
            reference = predictor.classify if data is None else load_exported(file)
            file, agreement = _prepend_preparation(predictor, file, reference, images)
            verified_on = f"{images.description}, crops of them included"
            check_agreement(agreement, f"{suffix} file", verified_on)
            agreements["verified" if data is None else "verified_preparation"] = agreement
        facts = about(predictor, checkpoint, format, input, agreements) | quantized
        put_file_in_place(file, facts, target, description_path)
    num_bytes = sum(path.stat().st_size for path in files_of(target))
    names = " and ".join([str(target), *(path.name for path in files_of(target)[1:])])
    print(f"{names} ({num_bytes / 1e6:.1f} MB), and {description_path.name} about it")
    print(message or describe_agreement(agreement, verified_on, predictor.label_kind))
    return target


def read_trained(ckpt_path: str) -> dict[str, Any]:
    """Return the content of a checkpoint of `finetune fit`.

    Raises:
        WrongUsage: It is an exported file.
        ValueError: It is not a checkpoint.
    """
    checkpoint = read_checkpoint(ckpt_path)
    if isinstance(checkpoint, ExportedCheckpoint):
        raise WrongUsage(
            f"{ckpt_path} is an exported file: use the checkpoint from which it was exported"
        )
    return checkpoint


def _check_options(format: str, input: str, quantize: str | None, root: str | None) -> None:
    """Check that options are for the format; see `export`."""
    if root and not quantize:
        raise WrongUsage("--root is for --quantize int8")
    if format != "onnx" and (quantize or input != "network_size"):
        option = f"--quantize {quantize}" if quantize else f"--input {input}"
        raise WrongUsage(f"{option} makes an .onnx, not --format {format}")


def _check_bilinear(checkpoint: Mapping[str, Any]) -> None:
    """Check that images are resized as a file of any size does it."""
    kernel = checkpoint["datamodule_hyper_parameters"].get("interpolation", "bilinear")
    if kernel != "bilinear":
        raise WrongUsage(
            f"--input any_size does not support the resize of this network, {kernel}: remove it, and prepare images "
            "as described in the .json next to the file"
        )


def _target_file(
    ckpt_path: str, format: str, output: str | None, input: str, quantize: str | None
) -> Path:
    """Return the file to write: `output`, or one next to the checkpoint.

    Raises:
        WrongUsage: The suffix of `output` is not that of the format.
    """
    suffix, _ = WRITERS[format]
    if not output:
        size = ".any_size" if input == "any_size" else ""
        precision = "" if quantize is None else f".{quantize}"
        return Path(ckpt_path).with_suffix(f"{size}{precision}{suffix}")
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
    with verified_timm_folder(ckpt_path, checkpoint, verify_on) as (folder, verified):
        num_bytes = sum(file.stat().st_size for file in folder.iterdir())
        put_folder_in_place(folder, target, (DESCRIPTION, README, *TIMM_FILES))
    print(
        f"{target} ({num_bytes / 1e6:.1f} MB) for timm.create_model('local-dir:{target}', pretrained=True)"
    )
    print(verified)
    return target


@contextmanager
def verified_timm_folder(
    ckpt_path: str,
    checkpoint: dict[str, Any],
    verify_on: str | None = None,
    repository: str = "OWNER/NAME",
) -> Iterator[tuple[Path, str]]:
    """Yield a temporary folder in timm's layout that predicts as a checkpoint, and a line about the verification.

    Args:
        ckpt_path: The checkpoint.
        checkpoint: Its content.
        verify_on: See `export`.
        repository: The repository on the hub, for README.md.

    Raises:
        WrongUsage: timm's format does not support the checkpoint.
        ValueError: The folder does not predict as the checkpoint.
    """
    predictor = Predictor(ckpt_path, checkpoint=checkpoint)
    check_supported(predictor)
    images = images_to_verify(verify_on)
    prepared = images.prepared(predictor)
    with workplace() as folder:
        write_timm_folder(predictor, checkpoint, folder)
        run = load_timm_folder(folder, predictor.label_kind)
        agreement = compare_prepared(predictor, run, prepared)
        check_agreement(agreement, "timm folder", images.description)
        facts = about(predictor, checkpoint, "timm", "network_size", {"verified": agreement})
        write_description(folder / DESCRIPTION, facts)
        text = readme(predictor, _card(ckpt_path, checkpoint), repository)
        (folder / README).write_text(text, "utf-8")
        yield folder, describe_agreement(agreement, images.description, predictor.label_kind)


def _export_coreml(
    ckpt_path: str, checkpoint: dict[str, Any], output: str | None, verify_on: str | None
) -> Path:
    """Write a package of Core ML; see `export`."""
    target = Path(output) if output else Path(ckpt_path).with_suffix(".mlpackage")
    if target.suffix != ".mlpackage" or (target.exists() and not target.is_dir()):
        raise WrongUsage(f"--out {target}: --format coreml writes a folder, NAME.mlpackage")
    for name in (DESCRIPTION, *COREML_FILES):
        check_target(target / name, "--out")
    import_coremltools()
    predictor = Predictor(ckpt_path, checkpoint=checkpoint)
    images = images_to_verify(verify_on)
    prepared = images.prepared(predictor)
    program = exported_program(predictor)
    agreement = compare_prepared(predictor, runner(program), prepared)
    check_agreement(agreement, "package", images.description)
    with workplace() as folder:
        package = folder / target.name
        write_package(program, predictor, packed(checkpoint), package)
        agreements = {"verified_before_conversion": agreement}
        facts = about(predictor, checkpoint, "coreml", "network_size", agreements)
        write_description(package / DESCRIPTION, facts)
        names = (DESCRIPTION, *COREML_FILES)
        num_bytes = sum((package / name).stat().st_size for name in names)
        put_folder_in_place(package, target, names)
    print(f"{target} ({num_bytes / 1e6:.1f} MB)")
    print(
        f"verified before the conversion against the checkpoint on {agreement.num_images} {images.description}: "
        f"{same_answers(predictor.label_kind)}, largest difference of a probability {agreement.largest:.1e}; in the "
        "package the image size, the class names and the normalisation were checked, but it was not run: only Apple's "
        "systems can run it"
    )
    return target


def _card(ckpt_path: str, checkpoint: dict[str, Any]) -> str:
    """Return the model card of the checkpoint's run, without folders of this machine; "" if it is not in a run."""
    run = Path(ckpt_path).resolve().parent.parent
    if not is_run_folder(run):
        return ""
    record = read_run(run)
    public = {"root": data_set(record), "licence_of_the_weights": licence_of(checkpoint)}
    return model_card(replace(record, about={**record.about, **public}))


def _quantize(
    predictor: Predictor, source: Path, data: ImageDataModule
) -> tuple[Path, dict[str, Any], str]:
    """Return the file in int8, its entry in the description, and a message about it."""
    from finetune.inference.quantize import compare, prepared_batches, quantize, readable

    train = data.splits["train"]
    test = data.splits["test"]
    target = source.with_name(f"int8.{source.name}")
    calibrated = draw_indices(len(train), _NUM_CALIBRATED, ESTIMATE)
    tested = np.sort(draw_indices(len(test), _MAX_TESTED, ESTIMATE))
    if data.on_bad_image == "skip":
        calibrated = readable(train, calibrated)
        tested = readable(test, tested)
    quantize(source, target, prepared_batches(predictor, train, calibrated, "calibrating int8"))
    loss = compare(predictor, source, target, test, tested)
    if loss.reason_against:
        raise ValueError(
            f"the int8 file was discarded: {loss.reason_against}, on {loss.num_images} test images"
        )
    other = "another class" if predictor.label_kind == "single" else "other labels"
    message = (
        f"int8 on {loss.num_images} test images: {loss.metric} {loss.accuracy[1]:.4f}, float "
        f"{loss.accuracy[0]:.4f}, {loss.num_other} with {other}; one image takes "
        f"{loss.milliseconds[1]:.1f} ms, with float {loss.milliseconds[0]:.1f} ms"
    )
    return target, {"quantized": loss.as_plain()}, message


def _prepend_preparation(
    predictor: Predictor,
    source: Path,
    reference: PredictionFunction,
    images: VerificationImages,
) -> tuple[Path, Agreement]:
    """Return the file that takes images of any size, and how well it agrees with `reference` on prepared images."""
    from finetune.inference.any_size import prepend

    def prepared_before(batch: np.ndarray) -> np.ndarray:
        return reference(np.stack([predictor.prepare(image) for image in batch]))

    target = source.with_name(f"any.{source.name}")
    preparation = predictor.preparation
    prepend(
        source,
        target,
        predictor.image_size,
        preparation["resize"],
        preparation.get("crop_share", CROP_SHARE),
    )
    return target, compare_any_size(
        predictor, prepared_before, load_exported(target), (read() for read in images.readers)
    )
