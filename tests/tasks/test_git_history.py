"""No future in the box: what is left of a repository, and the receipt of what is gone."""

import asyncio
import subprocess
import tarfile
from pathlib import Path

import pytest

from carrel.errors import FilesRefused, ProgramMissing
from carrel.tasks.file_cache import Files, prepared_files
from carrel.tasks.sample import Sample
from tests.support.git_repository import Repository
from tests.tasks.conftest import OpenSample


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """Three commits, of which the second is the base; the future is in every place where git can keep one."""
    made = Repository(tmp_path / "source")
    first = made.commit("first", {"a": "one\n"})
    made.git("tag", "v1")
    made.git("tag", "-a", "-m", "the first", "v1.0")
    made.base = made.commit("second", {"a": "two\n", "b": "b\n"})
    made.git("tag", "-a", "-m", "fix is to come in a", "late-tag", first)
    made.future = made.commit("the fix", {"a": "fixed\n"})
    made.git("tag", "v2")
    made.git("branch", "other")
    (made.folder / "a").write_text("stashed secret\n")
    made.git("stash")
    made.git("gc", "-q")
    made.loose = made.commit("after gc", {"c": "loose\n"})
    made.git("update-ref", "refs/pull/7/head", "HEAD")
    made.git("update-ref", "refs/remotes/origin/main", "HEAD")
    made.git("remote", "add", "origin", "https://example.org/secret.git")
    made.git("notes", "add", "-m", "a note on the fix", "HEAD")
    made.git("reset", "-q", "--hard", made.base)
    return made


async def prepared(files: Path, cache: Path, base_commit: str = "") -> Files:
    return await prepared_files(Sample(sample_id="a", files=files, base_commit=base_commit), cache)


def opened(files: Files) -> Repository:
    return Repository.at(files.folder)


def holds_no_future(files: Files, source: Repository, base: str) -> None:
    inside = opened(files)
    assert inside.git("rev-parse", "HEAD") == base
    assert inside.git("status", "--porcelain") == ""
    assert inside.git("log", "--all", "--format=%s").split("\n") == ["second", "first"]
    assert inside.git("reflog", "--all") == ""
    assert inside.git("stash", "list") == ""
    assert inside.git("remote") == ""
    assert inside.git("fsck", "--full", "--unreachable", "--no-reflogs") == ""
    assert inside.git("for-each-ref", "--format=%(refname)").split() == [
        "refs/heads/trunk",
        "refs/tags/v1",
        "refs/tags/v1.0",
    ]
    reachable = set(source.git("rev-list", "--objects", "--no-object-names", base, "v1.0").split())
    assert set(inside.every_object()) == reachable
    for gone in (source.future, source.loose):
        inside.git("cat-file", "-e", gone, code=1)
    everything = b"".join(path.read_bytes() for path in files.folder.rglob("*") if path.is_file())
    for secret in (b"example.org/secret", b"fixed", b"stashed secret", b"late-tag", b"the fix"):
        assert secret not in everything


async def test_nothing_after_the_base_commit_is_left(repository: Repository, tmp_path: Path) -> None:
    base = repository.base
    files = await prepared(repository.folder, tmp_path / "cache", base)
    holds_no_future(files, repository, base)
    receipt = files.receipt.git
    assert receipt is not None
    assert (receipt.base_commit, receipt.commits_kept, receipt.tags_kept) == (base, 2, 2)
    assert (receipt.stashes_removed, receipt.remotes_removed, receipt.verified) == (1, 1, True)
    assert receipt.commits_removed >= 4
    assert receipt.objects_removed > receipt.commits_removed
    assert receipt.reflog_entries_removed > 3
    assert receipt.refs_removed >= 6
    assert receipt.moved_from is None
    assert "other" not in receipt.model_dump_json(), "a branch's name can say too much"


async def test_the_source_itself_is_left_as_it_is(repository: Repository, tmp_path: Path) -> None:
    before = (repository.every_object(), repository.git("for-each-ref"))
    await prepared(repository.folder, tmp_path / "cache", repository.base)
    assert (repository.every_object(), repository.git("for-each-ref")) == before


async def test_the_same_from_an_archive(repository: Repository, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "f.tar.gz", "w:gz") as archive:
        archive.add(repository.folder, "")
    base = repository.base
    holds_no_future(await prepared(tmp_path / "f.tar.gz", tmp_path / "cache", base), repository, base)


async def test_the_same_from_a_bundle(repository: Repository, tmp_path: Path) -> None:
    repository.git("bundle", "create", "-q", str(tmp_path / "f.bundle"), "--all")
    base = repository.base
    files = await prepared(tmp_path / "f.bundle", tmp_path / "cache", base)
    holds_no_future(files, repository, base)
    assert (files.folder / "a").read_text() == "two\n"
    assert files.receipt.source == "bundle"


async def test_paths_may_be_relative(repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository.git("bundle", "create", "-q", str(tmp_path / "f.bundle"), "--all")
    monkeypatch.chdir(tmp_path)
    files = await prepared(Path("f.bundle"), Path("cache"), repository.base)
    assert files.folder.is_absolute()
    holds_no_future(files, repository, repository.base)


@pytest.mark.parametrize("name", ["v1", "refs/tags/v1", "abbreviated"])
async def test_a_base_may_be_named_by_a_tag_or_a_short_hash(name: str, repository: Repository, tmp_path: Path) -> None:
    first = repository.git("rev-parse", "v1")
    repository.git("bundle", "create", "-q", str(tmp_path / "f.bundle"), "--all")
    files = await prepared(tmp_path / "f.bundle", tmp_path / "cache", first[:10] if name == "abbreviated" else name)
    assert opened(files).git("rev-parse", "HEAD") == first
    assert (files.folder / "a").read_text() == "one\n"
    assert not (files.folder / "b").exists()


async def test_without_a_base_it_is_what_is_checked_out(repository: Repository, tmp_path: Path) -> None:
    files = await prepared(repository.folder, tmp_path / "cache")
    holds_no_future(files, repository, repository.base)


async def test_the_files_move_to_the_base_and_what_git_does_not_know_stays(
    repository: Repository, tmp_path: Path
) -> None:
    repository.git("checkout", "-q", repository.loose)
    (repository.folder / "untracked").write_text("kept")
    files = await prepared(repository.folder, tmp_path / "cache", repository.base)
    assert (files.folder / "a").read_text() == "two\n"
    assert not (files.folder / "c").exists()
    assert opened(files).git("status", "--porcelain") == "?? untracked"
    assert files.receipt.git is not None
    assert files.receipt.git.moved_from == repository.loose


async def test_changes_that_the_sample_begins_with_stay(repository: Repository, tmp_path: Path) -> None:
    (repository.folder / "a").write_text("begun\n")
    files = await prepared(repository.folder, tmp_path / "cache", repository.base)
    assert (files.folder / "a").read_text() == "begun\n"
    assert opened(files).git("status", "--porcelain") == "M a"


async def test_one_bundle_serves_many_bases(repository: Repository, tmp_path: Path) -> None:
    repository.git("bundle", "create", "-q", str(tmp_path / "f.bundle"), "--all")
    base, future = repository.base, repository.future
    one = await prepared(tmp_path / "f.bundle", tmp_path / "cache", base)
    two = await prepared(tmp_path / "f.bundle", tmp_path / "cache", future)
    assert one.folder != two.folder
    assert opened(two).git("log", "--format=%s").split("\n") == ["the fix", "second", "first"]


async def test_a_nested_repository_keeps_its_files_and_loses_its_history(tmp_path: Path) -> None:
    outer = Repository(tmp_path / "source")
    outer.commit("outer", {"a": "a"})
    inner = Repository(tmp_path / "source" / "vendor" / "inner")
    inner.commit("inner", {"b": "b"})
    (tmp_path / "source" / "sub").mkdir()
    (tmp_path / "source" / "sub" / ".git").write_text("gitdir: /somewhere/else\n")
    files = await prepared(outer.folder, tmp_path / "cache")
    assert (files.folder / "vendor" / "inner" / "b").read_text() == "b"
    assert files.receipt.git is not None
    assert sorted(files.receipt.git.nested_removed) == ["sub/.git", "vendor/inner/.git"]
    assert [path for path in files.folder.rglob(".git") if path.parent != files.folder] == []


async def test_a_worktree_and_a_folder_that_is_no_repository_have_no_history(
    repository: Repository, tmp_path: Path
) -> None:
    repository.git("worktree", "add", "-q", str(tmp_path / "tree"), "v1")
    files = await prepared(tmp_path / "tree", tmp_path / "cache")
    assert not (files.folder / ".git").exists()
    assert files.receipt.git is not None
    assert files.receipt.git.nested_removed == [".git"]
    (tmp_path / "odd" / ".git").mkdir(parents=True)
    assert not ((await prepared(tmp_path / "odd", tmp_path / "cache")).folder / ".git").exists()


async def test_settings_and_hooks_of_a_stranger_are_never_run(repository: Repository, tmp_path: Path) -> None:
    trap = f"touch {tmp_path}/caught"
    config = (
        f'[core]\n\tfsmonitor = "{trap}"\n\tpager = "{trap}"\n\tsshCommand = "{trap}"\n\tworktree = /etc\n'
        f'[filter "evil"]\n\tsmudge = "{trap}"\n\tclean = "{trap}"\n\trequired = true\n'
        f'[uploadpack]\n\tpackObjectsHook = "{trap}"\n[diff]\n\texternal = "{trap}"\n'
    )
    (repository.folder / ".gitattributes").write_text("* filter=evil\n")
    repository.git("add", "-A")
    repository.git("commit", "-q", "-m", "third")
    base = repository.git("rev-parse", "HEAD")
    repository.git("checkout", "-q", "v1")
    (repository.folder / ".git" / "config").write_text(config)
    hooks = repository.folder / ".git" / "hooks"
    hooks.mkdir(exist_ok=True)
    for name in ("post-checkout", "post-index-change", "reference-transaction", "pre-auto-gc", "post-update"):
        (hooks / name).write_text(f"#!/bin/sh\n{trap}\n")
        (hooks / name).chmod(0o755)
    files = await prepared(repository.folder, tmp_path / "cache", base)
    assert not (tmp_path / "caught").exists()
    assert (files.folder / ".gitattributes").exists()
    inside = (files.folder / ".git" / "config").read_text()
    assert "evil" not in inside
    assert "touch" not in inside
    assert not (files.folder / ".git" / "hooks").exists()


async def test_a_shallow_clone_stays_shallow(repository: Repository, tmp_path: Path) -> None:
    repository.git("clone", "-q", "--depth", "1", f"file://{repository.folder}", str(tmp_path / "clone"))
    files = await prepared(tmp_path / "clone", tmp_path / "cache")
    assert opened(files).git("log", "--format=%s") == "second"


async def test_a_repository_with_longer_hashes(tmp_path: Path) -> None:
    made = Repository(tmp_path / "source", "--object-format=sha256")
    base = made.commit("one", {"a": "1"})
    made.commit("two", {"a": "2"})
    made.git("bundle", "create", "-q", str(tmp_path / "f.bundle"), "--all")
    for number, source in enumerate((made.folder, tmp_path / "f.bundle")):
        files = await prepared(source, tmp_path / f"cache{number}", base)
        assert opened(files).git("log", "--all", "--format=%s") == "one"
        assert (files.folder / "a").read_text() == "1"


async def test_a_repository_that_cannot_be_read_is_refused(repository: Repository, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(FilesRefused, match="the base commit 0123456789 is not in it"):
        await prepared(repository.folder, cache, "0123456789")
    with pytest.raises(FilesRefused, match="is not a commit"):
        await prepared(repository.folder, cache, "--all")
    repository.git("bundle", "create", "-q", str(tmp_path / "thin.bundle"), "v1..trunk")
    with pytest.raises(FilesRefused, match=r"thin.bundle is not a complete git bundle"):
        await prepared(tmp_path / "thin.bundle", cache)
    (tmp_path / "cut.bundle").write_bytes((tmp_path / "thin.bundle").read_bytes()[:200])
    with pytest.raises(FilesRefused, match=r"cut.bundle is not a complete git bundle"):
        await prepared(tmp_path / "cut.bundle", cache)
    repository.git("clone", "-q", "--shared", str(repository.folder), str(tmp_path / "shared"))
    with pytest.raises(FilesRefused, match=r"is not in it|borrowed"):
        await prepared(tmp_path / "shared", cache)
    empty = Repository(tmp_path / "empty")
    with pytest.raises(FilesRefused, match="no commit is checked out"):
        await prepared(empty.folder, cache)
    assert [
        path.name
        for path in (cache / "files").iterdir()
        if path.name != "digests" and (path.suffix not in (".lock", ".used", "") or path.is_dir())
    ] == []


async def test_a_tree_with_more_files_than_fit_anywhere_is_counted_first(tmp_path: Path) -> None:
    """Ten objects, ten to the power of ten files."""
    made = Repository(tmp_path / "bomb")
    (made.folder / "blob").write_text("x")
    blob = made.git("hash-object", "-w", "blob")
    listing = "\n".join(f"100644 blob {blob}\tf{number}" for number in range(10))
    for _ in range(10):
        done = subprocess.run(
            ["git", "mktree"], input=listing + "\n", cwd=made.folder, capture_output=True, text=True, check=True
        )
        tree = done.stdout.strip()
        listing = "\n".join(f"040000 tree {tree}\td{number}" for number in range(10))
    commit = made.git("commit-tree", "-m", "bomb", tree)
    made.git("update-ref", "refs/heads/trunk", commit)
    made.git("bundle", "create", "-q", str(tmp_path / "f.bundle"), "--all")
    with pytest.raises(FilesRefused, match=r"more than 2,000,000 files|unpacks to more than"):
        await prepared(tmp_path / "f.bundle", tmp_path / "cache", commit)


async def test_a_link_out_of_the_tree_in_a_commit_is_refused(tmp_path: Path) -> None:
    made = Repository(tmp_path / "source")
    (made.folder / "link").symlink_to("/etc/passwd")
    base = made.commit("link")
    made.git("bundle", "create", "-q", str(tmp_path / "f.bundle"), "--all")
    with pytest.raises(FilesRefused, match="the link link leads out of the sample's folder, to /etc/passwd"):
        await prepared(tmp_path / "f.bundle", tmp_path / "cache", base)


async def test_who_is_cancelled_ends_git_too(tmp_path: Path) -> None:
    made = Repository(tmp_path / "source")
    for number in range(3):
        made.commit(f"{number}", {f"f{part}": f"{number} {part}\n" * 2000 for part in range(300)})
    task = asyncio.ensure_future(prepared(made.folder, tmp_path / "cache"))
    while not list(tmp_path.glob("cache/files/*.making/scratch/new.git")):
        assert not task.done()
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # What was whole when the cancelling came may stay; nothing half made does.
    assert list((tmp_path / "cache" / "files").glob("*.making")) == []
    assert (await prepared(made.folder, tmp_path / "cache")).receipt.files > 300


async def test_a_machine_without_git_is_reported(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProgramMissing, match="git is not installed"):
        await prepared(repository.folder, tmp_path / "cache", repository.base)


async def test_in_a_session_git_works_and_knows_the_past_only(
    repository: Repository, tmp_path: Path, open_sample: OpenSample
) -> None:
    repository.git("bundle", "create", "-q", str(tmp_path / "f.bundle"), "--all")
    sample = Sample(sample_id="a", files=tmp_path / "f.bundle", base_commit=repository.base)
    executor = await open_sample(sample)

    async def output(command: str) -> str:
        done = await executor.exec(command)
        assert done.exit_code == 0, done.stderr
        return done.stdout.strip()

    assert await output("git status --porcelain") == ""
    assert await output("git log --all --format=%s") == "second\nfirst"
    assert await output("git describe --tags --always") != ""
    assert (await executor.exec(f"git cat-file -e {repository.future}")).exit_code != 0
    assert await output("git fsck --unreachable --no-reflogs 2>/dev/null") == ""
    assert await output("grep -rl 'example.org/secret' /workspace /home /tmp; true") == ""
    await output("echo new > c && git add c && git -c user.name=x -c user.email=x@y commit -qm mine")
    assert await output("git log --format=%s") == "mine\nsecond\nfirst"
    other = await open_sample(sample)
    assert (await other.exec("git log --format=%s")).stdout.strip() == "second\nfirst"
