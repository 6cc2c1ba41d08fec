"""The Hub adapter without a server: tokens that are none, and what reading a file imports."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from tasks.adapters.hub import HfHub
from tasks.core.errors import InputError
from tasks.node.environment import hub_from_environment

REPO = "moonshotai/Kimi-K2-Instruct"
TOKEN = "hf_only_for_this_test"


@pytest.mark.parametrize("text", [f"{TOKEN}\nsecond line", f"{TOKEN} # mine", f"{TOKEN}\x00", f"{TOKEN}\xe9"])
def test_a_token_that_is_no_single_word_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    with pytest.raises(InputError, match="token") as caught:
        HfHub("http://127.0.0.1:1", token_file=str(path)).resolve(REPO, "main")
    assert TOKEN not in "".join(traceback.format_exception(caught.value))
    assert str(path) in caught.value.where


def test_a_token_file_of_the_environment_goes_before_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_variable")
    assert hub_from_environment(1.0)._token() == "hf_of_the_variable"
    monkeypatch.setenv("HF_TOKEN_PATH", str(path))
    for text in ("hf_first\n", "hf_second"):  # a mounted Secret is replaced while the program runs
        path.write_text(text)
        assert hub_from_environment(1.0)._token() == text.strip()


def test_reading_starts_quickly() -> None:
    """Node programs read files only: the library's large API module is not imported for that."""
    code = (
        "import sys; from tasks.adapters.hub import HfHub\n"
        "try: list(HfHub(sys.argv[1]).open_file('a/b', 'a' * 40, 'x', 0))\n"
        "except Exception as error: assert type(error).__name__ == 'UnavailableError', error\n"
        "assert 'huggingface_hub.hf_api' not in sys.modules"
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody else gets this port, and nobody listens
        command = [sys.executable, "-c", code, f"http://127.0.0.1:{taken.getsockname()[1]}"]
        subprocess.run(command, check=True, timeout=60, env={**os.environ, "HF_HUB_OFFLINE": "0"})
