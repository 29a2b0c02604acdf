"""`finetune push`: upload a trained model to the Hugging Face hub in timm's layout."""

import sys
from pathlib import Path

from finetune.commands.export import read_trained, verified_timm_folder
from finetune.inference.timm_folder import DESCRIPTION, README, TIMM_FILES
from finetune.models.hub import SCHEME, check_hub_client, hub_errors, parse_hub_address
from finetune.system.messages import WrongUsage, bytes_text

_FILES = (README, DESCRIPTION, *TIMM_FILES)


def push(
    ckpt_path: str,
    repository: str,
    private: bool = False,
    dry_run: bool = False,
    verify_on: str | None = None,
) -> None:
    """Upload a trained model to the Hugging Face hub, so that timm and finetune can load it.

    The upload is one commit: model.safetensors, config.json, finetune.json and the model card README.md. It is
    discarded if a probability differs from the checkpoint's by more than 1e-4, or if a class differs. The server is
    that of HF_ENDPOINT. The token is that of `hf auth login` or HF_TOKEN.

    Args:
        ckpt_path: A checkpoint of `finetune fit`.
        repository: OWNER/NAME. It is created if it does not exist. Its README.md is kept if it has one.
        private: Create a private repository. A public one that exists is refused.
        dry_run: Write and verify the files, list them with their sizes, and make no request.
        verify_on: Image, folder, glob or text file with a path on each line. At most 64 images are compared;
            synthetic images by default.
    """
    address = parse_hub_address(repository)
    if address.revision is not None:
        raise WrongUsage(f"{repository}: a push adds a commit to the default branch: remove @…")
    name = address.repository
    check_hub_client("finetune push")
    if not dry_run:
        _check_upload(name)
    checkpoint = read_trained(ckpt_path)
    with verified_timm_folder(ckpt_path, checkpoint, verify_on, name) as (folder, verified):
        print(verified)
        if dry_run:
            for file in _FILES:
                print(f"{file}  {bytes_text((folder / file).stat().st_size)}")
            print(f"nothing was uploaded: without --dry_run, these files go to {SCHEME}{name}")
            return
        commit = _upload(folder, name, private)
    print(commit)
    print(f"timm.create_model('hf-hub:{name}', pretrained=True); finetune predict {SCHEME}{name}")


def _check_upload(name: str) -> None:
    """Check that requests are allowed and that there is a token, before the files are written and verified."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise WrongUsage(
            f"cannot upload to {SCHEME}{name}: HF_HUB_OFFLINE forbids requests. Unset it, or use --dry_run"
        )
    if get_token() is None:
        raise WrongUsage(
            "finetune push needs a token of the Hugging Face hub: hf auth login, or HF_TOKEN"
        )


def _upload(folder: Path, name: str, private: bool) -> str:
    """Upload the files in one commit, and return its URL.

    Args:
        folder: The folder with the files.
        name: OWNER/NAME.
        private: Whether the repository must be private.

    Raises:
        WrongUsage: It must be private, and is public.
        OSError: The hub refuses the upload, or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    hub = HfApi()
    with hub_errors(f"cannot upload to {SCHEME}{name}"):
        # None: the default of the owner, which may be private
        hub.create_repo(name, private=True if private else None, exist_ok=True)
        if private and not hub.model_info(name).private:
            raise WrongUsage(
                f"{SCHEME}{name} exists and is public: make it private on its page first"
            )
        has_card = hub.file_exists(name, README)
        names = [file for file in _FILES if not (has_card and file == README)]
        if has_card:
            print(f"kept the {README} of {SCHEME}{name}", file=sys.stderr)
        operations = [CommitOperationAdd(file, folder / file) for file in names]
        message = "Upload a classifier trained with finetune"
        commit = hub.create_commit(name, operations, commit_message=message)
    return str(commit.commit_url)
