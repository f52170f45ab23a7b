"""Features that find no room are refused before any is computed."""

import shutil

from outrider.data.folders import Folder


def check_budget(size: int, max_bytes: int | None) -> None:
    """ValueError for features of more bytes than are allowed."""
    if max_bytes is not None and size > max_bytes:
        raise ValueError(
            f"max_bytes is {max_bytes:,}, the features need {size:,} bytes; allow more, read fewer "
            "tokens (limit_tokens, max_length), store int8 or int4, or compute features online"
        )


def check_disk(size: int, folder: Folder) -> None:
    """ValueError for more bytes than are free on the folder's disk."""
    free = shutil.disk_usage(folder.local).free
    if size > free:
        raise ValueError(
            f"the features need {size:,} bytes, {folder.name} has {free:,} free; free some space, "
            "read fewer tokens (limit_tokens, max_length), or store int8 or int4"
        )
