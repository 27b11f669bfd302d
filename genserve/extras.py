"""The commands that install what is missing, for people to copy. Reads the metadata of what is installed."""

from pathlib import Path
from urllib.parse import unquote, urlsplit


def pip_install(extras: str = "", options: str = "") -> str:
    """What installs genserve with these extras from where this one is from: a checkout, a wheel, a repository or an
    index. `options` are further ones of pip."""
    url, is_editable = _origin()
    name = f"genserve[{extras}]" if extras else "genserve"
    what = f'"{name} @ {url}"' if url else f'"{name}"'
    if is_editable:
        place = unquote(urlsplit(url).path)
        what = f'-e "{place}[{extras}]"' if extras else f'-e "{place}"'
    return " ".join(filter(None, ("pip install", options, what)))


def pip_install_engine() -> str:
    """What installs the engine, for either kind of device."""
    cpu = f'PIP_EXTRA_INDEX_URL="$TORCH_CPU" {pip_install("cpu")}'
    return f"{pip_install('cuda')}, or without a GPU {cpu}, where TORCH_CPU is PyTorch's index of CPU builds"


def _origin() -> tuple[str, bool]:
    """The URL that pip has installed genserve from, "" for an index, and whether it is a checkout that stays in use."""
    import json
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        recorded = distribution("genserve").read_text("direct_url.json")
    except PackageNotFoundError:  # a checkout on the path
        return Path(__file__).parents[1].as_uri(), False
    origin = json.loads(recorded or "{}")
    url: str = origin.get("url", "")
    if version_control := origin.get("vcs_info"):
        return f"{version_control['vcs']}+{url}@{version_control['commit_id']}", False
    return url, origin.get("dir_info", {}).get("editable", False)
