"""The folder of a place of images: of a bucket its address, of an archive or a dataset of the hub a local folder."""

import glob
from pathlib import Path

from finetune.data.addresses import is_dataset, is_in_bucket, parse_address, repository_of
from finetune.data.archives import unpacked
from finetune.data.data_place import is_archive
from finetune.data.mirror import Mirror
from finetune.models.hub import hub_errors


def local_folder(place: str) -> str:
    """Return the folder or file of the images of a place, as `image_files` takes it.

    An archive is unpacked once, and a dataset of the hub downloaded once. A bucket is listed by each call; its folder
    stays an address, and its images are copied when they are read. A local folder or file is returned as it is.

    Raises:
        OSError: The place cannot be read, or it does not exist.
        ValueError: The archive is damaged or hostile.
        StorageError: Object storage cannot be reached.
    """
    if is_dataset(place):
        return _downloaded(place)
    if is_archive(place):
        return unpacked(place)
    return Mirror(place).address if is_in_bucket(place) else place


def _downloaded(place: str) -> str:
    """Return a folder of a dataset at the newest commit of its revision, in the cache of the hub's client."""
    address = parse_address(place)
    from huggingface_hub import snapshot_download

    repository, revision = repository_of(address)
    inside = glob.escape(address.key)
    with hub_errors(f"cannot download {address}"):
        commit = snapshot_download(
            repository,
            repo_type="dataset",
            revision=revision,
            allow_patterns=[inside, f"{inside}/*"] if inside else None,
        )
    folder = Path(commit, address.key)
    if not folder.exists():
        raise FileNotFoundError(f"{str(address)!r} does not exist")
    return str(folder)
