"""Where the compiled programs come from; the Go compiler is a script that writes scripts."""

import hashlib
import os
import threading

import pytest

from infra.rehearsal import binaries, cache, gomodules
from infra.rehearsal.binaries import (
    KUBELET,
    LWS_MANAGER,
    PROGRAMS,
    control_plane_set,
    ensure_control_plane,
    ensure_program,
    kubelet_set,
    lws_set,
)
from infra.rehearsal.cache import cache_directory
from infra.rehearsal.errors import SiteError

GO = """#!/bin/sh
echo "$@" >> {log}
while [ "$1" != -o ]; do shift; done
case "$3" in */{broken}) echo "cmd/x/main.go:7:2: undefined: missing"; exit 1;; esac
while [ "{wait_for}" ] && [ ! -e "{wait_for}" ]; do sleep 0.02; done
printf '#!/bin/sh\\necho Kubernetes v1.36.3\\n' > "$2" && chmod +x "$2"
"""


def program(path, text="#!/bin/sh\necho Kubernetes v1.36.3\n"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    monkeypatch.setenv("K2_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Install the pretended compiler; returns a function that reads how often each program was built."""

    def install(broken="nothing", wait_for=""):
        go = program(tmp_path / "go", GO.format(log=tmp_path / "go.log", broken=broken, wait_for=wait_for))
        monkeypatch.setattr(gomodules, "find_go", lambda: go)

    def built():
        lines = (tmp_path / "go.log").read_text().splitlines()
        return [line.rsplit("/", 1)[1] for line in lines]

    install.built = built
    return install


def test_builds_the_four_once_with_progress_and_then_needs_no_compiler(compiler, monkeypatch):
    compiler()
    lines = []
    found = ensure_control_plane(lines.append)
    assert compiler.built() == list(PROGRAMS)
    assert any("[2/4] kube-apiserver: compiling (about 150 s)" in line for line in lines)
    assert found.version == "1.36.3" and "built into" in found.source

    monkeypatch.setattr(gomodules, "find_go", lambda: pytest.fail("the cache was not used"))
    again = ensure_control_plane(lines.append)
    assert again.by_name() == found.by_name() and again.source.startswith("cache ")


def test_the_version_is_linked_in(compiler, tmp_path):
    compiler()
    ensure_control_plane(lambda line: None)
    assert "version.gitVersion=v1.36.3 " in (tmp_path / "go.log").read_text()


def test_a_failed_build_shows_the_compilers_words_and_the_next_command(compiler):
    compiler(broken="kube-apiserver")
    with pytest.raises(SiteError) as raised:
        ensure_control_plane(lambda line: None)
    text = str(raised.value)
    assert "kube-apiserver was not built" in text and "undefined: missing" in text and "next: cd " in text
    left = {path.name for path in control_plane_set().directory.iterdir()}
    assert left == {"etcd", "etcd.build.log", "kube-apiserver.build.log"}, "no half-made program, and etcd is kept"


def test_a_second_builder_waits_and_builds_nothing(compiler, tmp_path):
    waited = tmp_path / "waited"
    compiler(wait_for=waited)
    found = []

    def report(line):
        if "another program is building" in line:
            waited.touch()

    threads = [threading.Thread(target=lambda: found.append(ensure_control_plane(report))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert waited.exists()
    assert found[0].by_name() == found[1].by_name()
    assert sorted(compiler.built()) == sorted(PROGRAMS)


def test_a_lock_that_is_never_given_back_is_an_error(tmp_path):
    lines = []
    with (
        cache.exclusive(tmp_path / "lock", lines.append),
        pytest.raises(SiteError, match="has held"),
        cache.exclusive(tmp_path / "lock", lines.append, timeout_s=0.3),
    ):
        pytest.fail("two held the lock")


def test_kubebuilder_assets_come_first(tmp_path, monkeypatch):
    for name in PROGRAMS:
        program(tmp_path / "assets" / name)
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path / "assets"))
    found = ensure_control_plane(lambda line: None)
    assert {path.parent for path in found.by_name().values()} == {tmp_path / "assets"}
    assert found.source == f"KUBEBUILDER_ASSETS={tmp_path / 'assets'}"


def test_what_kubebuilder_assets_lack_is_built_and_said(tmp_path, monkeypatch, compiler):
    compiler()
    for name in ("etcd", "kube-apiserver"):
        program(tmp_path / "assets" / name)
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path / "assets"))
    lines = []
    found = ensure_control_plane(lines.append)
    assert "not kube-controller-manager or kube-scheduler" in lines[0]
    assert found.kube_apiserver.parent == tmp_path / "assets"
    assert compiler.built() == ["kube-controller-manager", "kube-scheduler"]


def test_kubebuilder_assets_without_an_apiserver_are_refused(tmp_path, monkeypatch):
    program(tmp_path / "assets" / "etcd")
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path / "assets"))
    with pytest.raises(SiteError, match="no executable kube-apiserver"):
        ensure_control_plane(lambda line: None)


def test_without_a_compiler_the_error_says_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gomodules.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(SiteError, match=r"could not be installed(?s:.*)next: install Go"):
        ensure_control_plane(lambda line: None)


def copy_of_the_module(to, *extra):
    for path in (binaries.MODULE / "go.mod", binaries.MODULE / "go.sum", *binaries.MODULE.glob("cmd/*/main.go")):
        program(to / path.relative_to(binaries.MODULE), path.read_text())
    for name in extra:
        program(to / "cmd" / name / "main.go", f"// Command {name}\n")
    return to


def test_the_key_follows_every_pinned_byte(tmp_path, monkeypatch):
    before = control_plane_set().directory
    assert before.name.startswith("k8s-v1.36.3-etcd-v3.6.13-")
    monkeypatch.setattr(binaries, "MODULE", copy_of_the_module(tmp_path / "module"))
    assert control_plane_set().directory == before
    with (tmp_path / "module" / "go.sum").open("a") as file:
        file.write("one more\n")
    assert control_plane_set().directory != before


def test_a_kubelet_beside_the_four_leaves_their_builds_valid(tmp_path, monkeypatch, compiler):
    compiler()
    before = ensure_control_plane(lambda line: None)
    monkeypatch.setattr(binaries, "MODULE", copy_of_the_module(tmp_path / "module", KUBELET))
    assert ensure_control_plane(lambda line: None).by_name() == before.by_name()
    assert compiler.built() == list(PROGRAMS), "the kubelet is built only when it is asked for"
    kubelet = ensure_program(KUBELET, lambda line: None)
    assert compiler.built() == [*PROGRAMS, KUBELET]
    assert kubelet == kubelet_set().directory / KUBELET and kubelet.parent != before.etcd.parent


def test_the_manager_is_upstreams_own_program_with_its_version_linked_in(tmp_path, compiler):
    compiler()
    lines = []
    manager = ensure_program(LWS_MANAGER, lines.append)
    assert manager == lws_set().directory / LWS_MANAGER and os.access(manager, os.X_OK)
    assert manager.parent.name.startswith("lws-v0.9.0-")
    words = (tmp_path / "go.log").read_text()
    assert "sigs.k8s.io/lws/pkg/version.GitVersion=v0.9.0 " in words and words.endswith(" sigs.k8s.io/lws/cmd\n")
    assert any("[1/1] lws-manager: compiling (about 120 s)" in line for line in lines)
    ensure_program(LWS_MANAGER, lambda line: pytest.fail("the cache was not used"))


def test_kubebuilder_assets_may_hold_the_manager_too(tmp_path, monkeypatch):
    manager = program(tmp_path / "assets" / LWS_MANAGER)
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path / "assets"))
    assert ensure_program(LWS_MANAGER, lambda line: None) == manager


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"K2_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/k2-release"),
    ],
)
def test_the_cache_stands_where_it_was_told(environ, expected):
    assert str(cache_directory(environ)) == expected


@pytest.mark.parametrize(
    ("printed", "version"),
    [
        ("Kubernetes v1.36.3", "1.36.3"),
        ("etcd Version: 3.6.13\nGo Version: go1.26.8", "3.6.13"),
        ("version 8000GB 4.48 pypi linux amd64", "4.48"),
        ("no number here", "unknown"),
    ],
)
def test_executable_facts_read_the_version_that_the_program_prints(tmp_path, printed, version):
    path = program(tmp_path / "program", f"#!/bin/sh\nprintf '{printed}'\n")
    facts = binaries.executable_facts(path)
    assert (facts.path, facts.version) == (path, version)
    assert facts.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_executable_facts_follow_a_changed_file(tmp_path):
    path = program(tmp_path / "program")
    before = binaries.executable_facts(path)
    program(path, "#!/bin/sh\necho Kubernetes v1.37.0\n")
    later_ns = path.stat().st_mtime_ns + 1  # file systems stamp in ticks: the second write may be in the first one's
    os.utime(path, ns=(later_ns, later_ns))
    assert binaries.executable_facts(path).sha256 != before.sha256
