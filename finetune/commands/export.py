"""`finetune export`: write a checkpoint as a file for other programs, verified against the network."""

import errno
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

import finetune
from finetune.commands.explicit_settings import ExplicitSettings
from finetune.commands.trust import data_settings
from finetune.data.addresses import is_address
from finetune.data.data_place import address_in, at_place, place_of
from finetune.data.datamodule import ImageDataModule
from finetune.data.decode import decode
from finetune.data.prediction_paths import files_to_predict
from finetune.data.samplers import ESTIMATE, SHEET, draw_indices
from finetune.data.seen import exclude_copies, exclude_seen_of_same_folder
from finetune.data.tables.table_file import is_table
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
    drawn_image,
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
from finetune.system.files import check_target, one_at_a_time, replacing, unfinished
from finetune.system.messages import WrongUsage, as_wrong_usage

_MAX_VERIFIED = 64  # images on which the file is compared with the network
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
    checkpoint = read_checkpoint(ckpt_path)
    if isinstance(checkpoint, ExportedCheckpoint):
        raise WrongUsage(
            f"{ckpt_path} is an exported file: use the checkpoint from which it was exported"
        )
    is_several = checkpoint["hyper_parameters"].get("label_kind", "single") == "several"
    if root and not quantize:
        raise WrongUsage("--root is for --quantize int8")
    if format != "onnx" and (quantize or input != "network_size"):
        wanted = f"--quantize {quantize}" if quantize else f"--input {input}"
        raise WrongUsage(f"{wanted} makes an .onnx, not --format {format}")
    if format in ("coreml", "timm"):
        export_folder = _export_coreml if format == "coreml" else _export_timm
        return export_folder(ckpt_path, checkpoint, output, verify_on)
    suffix, write = WRITERS[format]
    kernel = checkpoint["datamodule_hyper_parameters"].get("interpolation", "bilinear")
    if input == "any_size" and kernel != "bilinear":
        hint = "remove it, and prepare images as described in the .json next to the file"
        raise WrongUsage(
            f"--input any_size does not support the resize of this network, {kernel}: {hint}"
        )
    kind = ""
    if input == "any_size":
        kind += ".any_size"
    if quantize is not None:
        kind += ".int8"
    target = Path(output) if output else Path(ckpt_path).with_suffix(f"{kind}{suffix}")
    if target.suffix != suffix:
        others = [name for name, (other, _) in WRITERS.items() if other == target.suffix]
        hint = f"; --format {others[0]} writes a {target.suffix}" if others else ""
        raise WrongUsage(f"--out {output}: a file of --format {format} is a {suffix}{hint}")
    description_path = target.with_name(f"{target.name}.json")
    for path in (*_files_of(target), description_path):
        check_target(path, "--out")
    predictor = Predictor(ckpt_path, checkpoint=checkpoint)
    data = _data(checkpoint, root, predictor.class_names) if quantize else None
    images, what = _images_to_verify(verify_on)
    module = EndToEnd(predictor.model, predictor.calibration).eval()
    print(
        f"writing {predictor.network_name} as {target.name}, which takes some seconds",
        file=sys.stderr,
        flush=True,
    )
    with _workplace() as folder:
        file = folder / target.name
        write(module, predictor.image_size, packed(checkpoint, input), file)
        run = load_exported(file)
        agreement = compare_prepared(
            predictor, run, np.stack([predictor.prepare(read()) for read in images])
        )
        _check(agreement, f"{suffix} file", what)
        agreements = {"verified" if data is None else "verified_before_int8": agreement}
        message = ""
        quantized = dict[str, Any]()
        if data is not None:
            file, quantized, message = _quantize(predictor, file, data)
        if input == "any_size":
            reference = predictor.classify if data is None else load_exported(file)
            file, agreement = _prepend_preparation(predictor, file, reference, images)
            what = f"{what}, crops of them included"
            _check(agreement, f"{suffix} file", what)
            agreements["verified" if data is None else "verified_preparation"] = agreement
        facts = about(predictor, checkpoint, format, input, agreements) | quantized
        _write_export(file, facts, target, description_path)
    num_bytes = sum(path.stat().st_size for path in _files_of(target))
    names = " and ".join([str(target), *(path.name for path in _files_of(target)[1:])])
    print(f"{names} ({num_bytes / 1e6:.1f} MB), and {description_path.name} about it")
    print(message or _describe(agreement, what, "labels" if is_several else "classes"))
    return target


def _export_timm(
    ckpt_path: str, checkpoint: dict[str, Any], output: str | None, verify_on: str | None
) -> Path:
    """Write a folder in timm's layout; see `export`."""
    target = Path(output) if output else Path(ckpt_path).with_suffix(".timm")
    if target.exists() and not target.is_dir():
        raise WrongUsage(f"--out {target}: --format timm writes a folder, and this is a file")
    for name in (README, DESCRIPTION, *TIMM_FILES):
        check_target(target / name, "--out")
    with verified_timm_folder(ckpt_path, checkpoint, verify_on) as (folder, verified):
        num_bytes = sum(file.stat().st_size for file in folder.iterdir())
        _put_folder_in_place(folder, target, (README, DESCRIPTION, *TIMM_FILES))
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
    images, what = _images_to_verify(verify_on)
    prepared = np.stack([predictor.prepare(read()) for read in images])
    with _workplace() as folder:
        write_timm_folder(predictor, checkpoint, folder)
        agreement = compare_prepared(
            predictor, load_timm_folder(folder, predictor.label_kind), prepared
        )
        _check(agreement, "timm folder", what)
        facts = about(predictor, checkpoint, "timm", "network_size", {"verified": agreement})
        (folder / DESCRIPTION).write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
        text = readme(predictor, _card(ckpt_path, checkpoint), repository)
        (folder / README).write_text(text, "utf-8")
        answers = "labels" if predictor.label_kind == "several" else "classes"
        yield folder, _describe(agreement, what, answers)


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
    images, what = _images_to_verify(verify_on)
    prepared = np.stack([predictor.prepare(read()) for read in images])
    program = exported_program(predictor)
    agreement = compare_prepared(predictor, runner(program), prepared)
    _check(agreement, "package", what)
    with _workplace() as folder:
        package = folder / target.name
        write_package(program, predictor, packed(checkpoint), package)
        agreements = {"verified_before_conversion": agreement}
        facts = about(predictor, checkpoint, "coreml", "network_size", agreements)
        (package / DESCRIPTION).write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
        names = (DESCRIPTION, *COREML_FILES)
        num_bytes = sum((package / name).stat().st_size for name in names)
        _put_folder_in_place(package, target, names)
    answers = "labels" if predictor.label_kind == "several" else "classes"
    print(f"{target} ({num_bytes / 1e6:.1f} MB)")
    print(
        f"verified before the conversion against the checkpoint on {agreement.num_images} {what}: same {answers}, "
        f"largest difference of a probability {agreement.largest:.1e}; in the package the image size, the class names "
        "and the normalisation were checked, but it was not run: only Apple's systems can run it"
    )
    return target


def _put_folder_in_place(folder: Path, target: Path, names: Sequence[str]) -> None:
    """Copy the files of an export to its folder. The last one is missing until the end: nothing can load a part."""
    with one_at_a_time(target):
        target.mkdir(parents=True, exist_ok=True)
        (target / names[-1]).unlink(missing_ok=True)
        for name in names:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            for leftover in unfinished(target / name):
                leftover.unlink(missing_ok=True)
            with replacing(target / name) as content:
                _copy(folder / name, content, target / name)


def _card(ckpt_path: str, checkpoint: dict[str, Any]) -> str:
    """Return the model card of the checkpoint's run, without folders of this machine; "" if it is not in a run."""
    run = Path(ckpt_path).resolve().parent.parent
    if not is_run_folder(run):
        return ""
    record = read_run(run)
    public = {"root": data_set(record), "licence_of_the_weights": licence_of(checkpoint)}
    return model_card(replace(record, about={**record.about, **public}))


def _copy(source: Path, temporary: Path, target: Path) -> None:
    """Copy a file to the temporary file that becomes `target`, which an error names."""
    try:
        shutil.copyfile(source, temporary)
    except OSError as error:  # it names the source
        raise OSError(error.errno, error.strerror, str(target)) from error


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


def _check(agreement: Agreement, kind: str, what: str) -> None:
    if not agreement.is_good:
        differs = f"a probability differs by {agreement.largest:.1e}, {agreement.num_other} have other classes"
        where = f"on {agreement.num_images} {what}"
        raise ValueError(
            f"the {kind} was discarded, since it does not predict as the checkpoint: {where} {differs}"
        )


def _describe(agreement: Agreement, what: str, answers: str) -> str:
    return (
        f"verified against the checkpoint on {agreement.num_images} {what}: same {answers}, largest difference of a "
        f"probability {agreement.largest:.1e}; one image takes "
        f"{agreement.milliseconds[0]:.1f} ms with the checkpoint, {agreement.milliseconds[1]:.1f} ms with the file"
    )


def _write_export(
    file: Path, facts: Mapping[str, Any], target: Path, description_path: Path
) -> None:
    """Write a file and its description atomically, so that both are of one export even if others run in parallel."""
    with one_at_a_time(target), ExitStack() as replaced:
        for path in (*_files_of(target), description_path):
            for leftover in unfinished(path):
                leftover.unlink(missing_ok=True)
        description = replaced.enter_context(replacing(description_path))
        for source, path in zip(_files_of(file), _files_of(target), strict=True):
            _copy(source, replaced.enter_context(replacing(path)), path)
        description.write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
        # Until the end there is no description, rather than that of another file, and no .xml that would take the
        # weights of another.
        description_path.resolve().unlink(missing_ok=True)
        if target.suffix == ".xml":
            target.resolve().unlink(missing_ok=True)


def _files_of(path: Path) -> list[Path]:
    """Return the files of an export without its description: a model of OpenVINO has its weights in a second one."""
    return [path, path.with_suffix(".bin")] if path.suffix == ".xml" else [path]


def _data(checkpoint: dict[str, Any], root: str | None, class_names: list[str]) -> ImageDataModule:
    """Return the data module with the images that a checkpoint was trained and tested on."""
    class_path = str(finetune.public_paths(checkpoint["finetune"].get("data_class")))
    if class_path.rpartition(".")[0] != "finetune":
        raise WrongUsage(f"--quantize int8 knows finetune's own data sets, not {class_path}")
    # The transforms of training are not needed. They may be of a module that only the user can trust.
    saved = checkpoint["datamodule_hyper_parameters"]
    arguments = {name: value for name, value in saved.items() if name != "augmentations"}
    settings = data_settings(
        {**checkpoint, "datamodule_hyper_parameters": arguments}, ExplicitSettings()
    )
    kind = getattr(finetune, class_path.rpartition(".")[2])
    explicit = {} if root is None else {"table" if is_table(root) else "root": root}
    arguments = {**at_place(settings["init_args"], explicit), **explicit}
    place = address_in(arguments) or place_of(arguments) or kind.default_root
    # an address only if the user has given it, not if it is that of the checkpoint
    is_there = place is not None and (place == root if is_address(place) else Path(place).exists())
    if not place or not is_there:
        start = (
            "the images of the checkpoint's run are not in"
            if root is None
            else "there is no folder"
        )
        raise WrongUsage(f"{start} {place}: --quantize int8 needs them, with --root FOLDER")
    if not kind.is_in(place):
        raise WrongUsage(
            f"{place} does not have the data set of the checkpoint, {class_path}: pass its folder as --root FOLDER"
        )
    overrides = {"class_names": class_names, "num_workers": 0}
    with as_wrong_usage("--quantize int8"):
        data: ImageDataModule = kind(**{**arguments, **overrides})
        data.read()
    if data.class_names != class_names:
        raise WrongUsage(f"{place} has other classes than the checkpoint")
    if not {"train", "test"} <= data.splits.keys():
        raise WrongUsage(f"--quantize int8 needs training and test images; {place} lacks some")
    if not exclude_seen_of_same_folder(data, "test", checkpoint):
        exclude_copies(data, "test", checkpoint)
    return data


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
    images: Sequence[Callable[[], np.ndarray]],
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
        predictor, prepared_before, load_exported(target), (read() for read in images)
    )


def _images_to_verify(verify_on: str | None) -> tuple[list[Callable[[], np.ndarray]], str]:
    """Return a function for each image that reads it (H, W, 3), and a description of the images."""
    if verify_on is None:
        return [partial(drawn_image, i) for i in range(_MAX_VERIFIED)], "synthetic images"
    paths = files_to_predict(verify_on)
    chosen = np.sort(draw_indices(len(paths), _MAX_VERIFIED, SHEET))
    what = "image" if len(paths) == 1 else "images"
    return [partial(decode, paths[int(i)]) for i in chosen], f"{what} of {verify_on}"
