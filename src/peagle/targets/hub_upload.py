"""Put a directory on the Hugging Face Hub as a model repository, with clear errors. Nothing local is changed."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from peagle import __version__
from peagle.errors import ConfigError, PeagleError, first_line

EMPTY = {".gitattributes"}
"""Files of a repository that was created, but that nothing was uploaded to."""
LOGIN = "run `hf auth login`, or set HF_TOKEN to a token that may write"


class PublishError(PeagleError):
    """The Hub cannot be reached, or does not accept what is published."""


def check_repository(repo: str, *, is_update: bool) -> None:
    """Refuse a bad name, a missing login and a repository that has files, before anything is computed."""
    from huggingface_hub import HfApi, errors
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(repo)
    except errors.HFValidationError as error:
        raise ConfigError(f"--repo {repo}: {first_line(error)}", hint="use ORG/NAME") from error
    if repo.count("/") != 1:
        raise ConfigError(f"--repo {repo} has no owner", hint=f"use ORG/{repo}, or your user name instead of ORG")
    with _explained(repo):
        HfApi().whoami()
        try:
            files = set(HfApi().list_repo_files(repo))
        except errors.RepositoryNotFoundError:
            return
    if files - EMPTY and not is_update:
        raise PublishError(
            f"{repo} exists and has {len(files)} files",
            hint="choose another name, or pass --update: it adds a commit, and earlier files stay in the history",
        )


def upload(directory: Path, repo: str, *, is_private: bool) -> str:
    """Create the repository unless it is there, and commit the files of `directory`. Returns its address.

    What an interrupted upload has sent is not sent again.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi()
    with _explained(repo):
        address = api.create_repo(repo, private=is_private, exist_ok=True)
        api.upload_folder(
            repo_id=repo, folder_path=directory, commit_message=f"Upload the drafter with peagle {__version__}"
        )
    return str(address)


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    """Turn errors of the Hub into ours."""
    from huggingface_hub import constants, errors

    try:
        yield
    except errors.LocalTokenNotFoundError as error:
        raise PublishError("you are not logged in to the Hugging Face Hub", hint=LOGIN) from error
    except errors.OfflineModeIsEnabled as error:
        raise PublishError("HF_HUB_OFFLINE is set", hint="unset it, or pass --output instead of --repo") from error
    except errors.RepositoryNotFoundError:
        raise
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status == 401:
            raise PublishError("the Hugging Face Hub does not accept your token", hint=LOGIN) from error
        if status == 403:
            raise PublishError(f"you may not write to {repo}: {first_line(error)}", hint=LOGIN) from error
        raise PublishError(f"the Hugging Face Hub answered HTTP {status}: {first_line(error)}") from error
    except ValueError as error:  # metadata that the Hub does not accept
        raise PublishError(
            f"{repo}: {' '.join(str(error).split())}", hint="check --license and --base-model"
        ) from error
    except Exception as error:  # no network: errors of several libraries
        reason = first_line(error.__cause__ or error)
        raise PublishError(
            f"the Hugging Face Hub ({constants.ENDPOINT}) cannot be reached: {reason}",
            hint="check the network and run the command again, or pass --output instead of --repo",
        ) from error
