"""RedisStore beyond the suite: a server that is gone, full, locked, a replica, restarted; and its settings."""

import asyncio
import contextlib
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from carrel.errors import ConfigurationError, StorageReadError, StorageUnavailable, StorageWriteError
from carrel.storage.redis.store import RedisStore
from tests.support.lazy_module import LazyModule
from tests.support.ports import free_port
from tests.support.real_redis import RealRedis
from tests.support.stores import Listener, everything, until
from tests.support.unreliable_proxy import UnreliableProxy

redis = LazyModule("redis")

Start = Callable[..., RealRedis]
Open = Callable[..., RedisStore]
WRITES: dict[str, Callable[[RedisStore], object]] = {
    "put": lambda store: store.put("o", b"x"),
    "append": lambda store: store.append("log", [b"x"]),
    "delete": lambda store: store.delete("o"),
    "copy": lambda store: store.copy("o", "p"),
    "lock": lambda store: store.lock("s"),
}
READS: dict[str, Callable[[RedisStore], object]] = {
    "get": lambda store: store.get("o"),
    "get_many": lambda store: store.get_many(["o"]),
    "list": lambda store: store.list(),
    "folders": lambda store: store.folders(),
    "stamp": lambda store: store.stamp("o"),
    "read": lambda store: everything(store, "log"),
    "watch": lambda store: anext(aiter(store.watch("log"))),
    "lock_owner": lambda store: store.lock_owner("s"),
    "scan": lambda store: store.scan(""),
}


def full_text(error: BaseException) -> str:
    """All that a person would see of it."""
    return f"{error} {error!r} " + "".join(traceback.format_exception(error))


@pytest.mark.parametrize("verb", [*WRITES, *READS])
async def test_where_no_server_answers_every_verb_says_so(open_redis: Open, verb: str) -> None:
    port = free_port()
    store = open_redis(f"redis://:s3cret@127.0.0.1:{port}/0")
    with pytest.raises(StorageUnavailable, match=f"127.0.0.1:{port} does not answer") as caught:
        await (WRITES | READS)[verb](store)  # type: ignore[misc]
    assert "s3cret" not in full_text(caught.value)
    assert "s3cret" not in repr(store)


async def test_a_host_that_does_not_exist_is_unavailable(open_redis: Open) -> None:
    with pytest.raises(StorageUnavailable, match=r"nowhere\.invalid"):
        await open_redis("redis://nowhere.invalid:6379").get("o")


@pytest.mark.parametrize("url", ["redis://:wrong-s3cret@{}", "redis://someone:wrong-s3cret@{}", "redis://{}"])
async def test_a_wrong_password_is_named_as_the_reason_and_never_shown(
    start_redis: Start, open_redis: Open, url: str
) -> None:
    server = start_redis(requirepass="right")
    for verb in (WRITES["append"], READS["get"]):
        with pytest.raises(StorageUnavailable, match="user and password") as caught:
            await verb(open_redis(url.format(f"127.0.0.1:{server.port}")))  # type: ignore[misc]
        assert "s3cret" not in full_text(caught.value)
    assert await open_redis(f"redis://:right@127.0.0.1:{server.port}").append("log", [b"x"]) == 1


async def test_a_server_that_quotes_the_password_is_not_passed_on(start_redis: Start, open_redis: Open) -> None:
    server = start_redis(rename_command="AUTH no-longer-auth")
    with redis.Redis.from_url(server.url) as client, pytest.raises(redis.ResponseError, match="s3cret"):
        client.execute_command("AUTH", "s3cret")
    store = open_redis(f"redis://:s3cret@127.0.0.1:{server.port}")
    with pytest.raises((StorageUnavailable, StorageReadError)) as caught:
        await store.get("o")
    assert "s3cret" not in full_text(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:6379",
        "http://localhost",
        "redis://:s3cret/word@host:1",
        "redis://h:x",
        "redis://h/abc",
        "redis://h/1/2",
        "redis://:a@s3cret/b#c@host:1",
        "redis://:a@s3cret/b@host:1",
        "redis://:a@s3cret#b@host:1",
        "redis://:a@s3cret?b@host:1",
    ],
)
def test_a_url_that_cannot_be_read_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigurationError, match="redis://") as caught:
        RedisStore(url)
    assert "s3cret" not in full_text(caught.value)


async def test_an_option_in_the_url_that_there_is_not_is_named() -> None:
    with pytest.raises(ConfigurationError, match="an unknown option: colour"):
        await RedisStore("redis://:s3cret@127.0.0.1:1?colour=red").get("o")


async def test_the_error_for_a_server_without_tls_says_so(start_redis: Start, open_redis: Open) -> None:
    server = start_redis()
    with pytest.raises(StorageUnavailable, match="speaks TLS: does the server"):
        await open_redis(f"rediss://127.0.0.1:{server.port}?socket_connect_timeout=1").get("o")


async def test_an_untrusted_certificate_is_reported_with_what_to_do(
    start_redis: Start, open_redis: Open, tmp_path: Path
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {certificate} -days 1 -subj /CN=localhost"
    subprocess.run([*command.split(), "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True)
    port = free_port()
    files = {"tls_cert_file": str(certificate), "tls_key_file": str(key), "tls_ca_cert_file": str(certificate)}
    start_redis(tls_port=str(port), tls_auth_clients="no", **files)
    with pytest.raises(StorageUnavailable, match=r"ssl_ca_certs=FILE to the URL"):
        await open_redis(f"rediss://localhost:{port}").get("o")
    assert await open_redis(f"rediss://localhost:{port}?ssl_ca_certs={certificate}").get("o") is None


async def test_what_other_programs_wrote_under_the_prefix_hides_nothing_and_is_named(
    start_redis: Start, open_redis: Open
) -> None:
    server = start_redis()
    store = open_redis(server.url)
    await store.put("sessions/a/o", b"x")
    await store.append("sessions/a/log", [b"1"])
    with redis.Redis.from_url(server.url) as client:
        client.zadd("carrel:index", {b"sessions/\xff\xfe/o": 0})
        client.hset("carrel:stamps", "theirs", "something else")
        client.xadd("carrel:log:sessions/a/log", {"theirs": "1", "too": "2"})
        client.set("carrel:lock:s", "theirs")
    assert await store.list("sessions") == ["sessions/a/log", "sessions/a/o"]
    assert await store.folders("sessions") == ["a"]
    for verb in (store.stamp("theirs"), everything(store, "sessions/a/log")):
        with pytest.raises(StorageReadError, match="not written by carrel"):
            await verb
    assert await store.lock_owner("s") == "theirs"


async def test_a_store_goes_on_when_its_server_was_restarted(start_redis: Start, open_redis: Open) -> None:
    server = start_redis(appendonly="yes", appendfsync="always")
    store = open_redis(server.url)
    await asyncio.gather(*[store.append("log", [b"%d" % number]) for number in range(50)])
    await store.put("o", b"kept")
    before = await everything(store, "log")
    server.kill()
    with pytest.raises(StorageUnavailable):
        await store.append("log", [b"lost"])
    server.start()
    assert await everything(store, "log") == before
    assert await store.append("log", [b"after"]) == 51
    assert await store.get("o") == b"kept"


async def test_a_line_cut_in_mid_call_is_unavailable_and_says_that_it_may_be_written(
    start_redis: Start, open_redis: Open
) -> None:
    server = start_redis()
    store = open_redis(server.url)
    await store.append("log", [b"1"])
    server.pause()
    calls = [asyncio.create_task(store.append("log", [b"2"])), asyncio.create_task(store.get("o"))]
    done, _ = await asyncio.wait(calls, timeout=0.3)
    assert not done
    server.kill()
    writing, reading = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(writing, StorageUnavailable)
    assert "may have been written" in str(writing)
    assert isinstance(reading, StorageUnavailable)
    assert "may have been written" not in str(reading)
    server.start()
    assert await store.append("log", [b"1"]) == 1


async def test_a_write_with_a_lost_answer_is_not_sent_again(start_redis: Start, open_redis: Open) -> None:
    server = start_redis()
    async with UnreliableProxy(server.port) as line:
        store = open_redis(line.url)
        await store.append("log", [b"1"])
        line.breaks = True
        with pytest.raises(StorageUnavailable, match="may have been written"):
            await store.append("log", [b"2"])
        assert await everything(open_redis(server.url), "log") == [b"1", b"2"]
        line.breaks = True
        assert await everything(store, "log") == [b"1", b"2"], "to read again does no harm"
        await store.close()


async def test_a_watcher_hears_that_the_server_is_gone(start_redis: Start, open_redis: Open) -> None:
    server = start_redis()
    store = open_redis(server.url)
    await store.append("log", [b"1"])
    listener = Listener(store, "log")
    assert await listener.next() == (1, b"1")
    server.kill()
    with pytest.raises(StorageUnavailable):
        await listener.next()


async def test_a_server_that_hangs_is_given_up_after_the_timeout_in_the_url(
    start_redis: Start, open_redis: Open
) -> None:
    server = start_redis()
    store = open_redis(f"{server.url}?socket_timeout=1")
    await store.put("o", b"x")
    server.pause()
    with pytest.raises(StorageUnavailable, match="does not answer"):
        await store.get("o")
    server.resume()
    assert await store.get("o") == b"x"


async def test_a_watch_and_a_wait_for_a_lock_outlast_a_short_timeout_in_the_url(
    start_redis: Start, open_redis: Open
) -> None:
    server = start_redis()
    store = open_redis(f"{server.url}?socket_timeout=1")
    await store.append("log", [b"1"])
    held = await store.lock("s")
    assert held
    waiting = asyncio.create_task(store.lock("s"))
    listener = Listener(store, "log", 2)
    done, _ = await asyncio.wait([waiting], timeout=2)
    assert not done
    await store.append("log", [b"2"])
    assert await listener.next() == (2, b"2")
    await held.release()
    assert await waiting
    await listener.stop()


async def test_a_full_server_takes_all_of_an_append_or_nothing_and_works_again_when_there_is_room(
    start_redis: Start, open_redis: Open
) -> None:
    server = start_redis(maxmemory="8mb", maxmemory_policy="noeviction")
    store = open_redis(server.url)
    await store.append("s/log", [b"first"])
    await store.put("s/o", b"old")
    await store.put("o", b"old")
    batch = [b"x" * 30_000] * 5
    kept = 1

    async def fill() -> None:
        nonlocal kept
        while True:
            kept = await store.append("s/log", batch)

    with pytest.raises(StorageWriteError, match="is full"):
        await fill()
    assert kept > 1
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", "1mb")
        for verb in ("put", "append", "copy"):
            with pytest.raises(StorageWriteError, match="is full"):
                await WRITES[verb](store)  # type: ignore[misc]
        lock = await store.lock("s")
        assert lock, "who wants to delete something takes a lock first"
        await asyncio.sleep(2)
        assert await store.lock_owner("s"), "and it is renewed"
        await lock.release()
    assert len(await everything(store, "s/log")) == kept
    assert await store.get("s/o") == b"old"
    assert await store.list() == ["o", "s/log", "s/o"]
    assert await store.delete("s/log") is True
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", "8mb")

    async def has_room() -> bool:
        # The server gives the memory of what was deleted back in a thread of its own.
        with contextlib.suppress(StorageWriteError):
            return await store.append("s/log", batch) == 5
        return False

    await until(has_room, True)
    assert await everything(store, "s/log") == batch


async def test_a_replica_can_be_read_and_watched_but_not_written(start_redis: Start, open_redis: Open) -> None:
    primary = start_redis(repl_diskless_sync_delay="0")
    replica = start_redis(replicaof=f"127.0.0.1 {primary.port}")
    there, here = open_redis(primary.url), open_redis(replica.url)
    await there.append("log", [b"1", b"2" * 30_000])
    await there.put("s/1/o", b"x")
    await until(lambda: here.list(), ["log", "s/1/o"])
    assert await everything(here, "log") == [b"1", b"2" * 30_000]
    assert await here.folders() == ["s"]
    assert list(await here.scan("s")) == ["s/1/o"]
    for verb in ("put", "append", "delete", "copy", "lock"):
        if verb in ("copy", "delete"):
            await there.put("o", b"x")
            await until(lambda: here.get("o"), b"x")
        with pytest.raises(StorageWriteError, match="read-only replica"):
            await WRITES[verb](here)  # type: ignore[misc]
    listener = Listener(here, "log", 3)
    await there.append("log", [b"3"])
    assert await listener.next() == (3, b"3")
    await there.delete("log")
    assert await listener.next() is None


async def test_a_user_who_may_only_read_hears_so(start_redis: Start, open_redis: Open) -> None:
    server = start_redis()
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "reader", "on", ">s3cret", "~*", "+@read", "-@dangerous")
    await open_redis(server.url).put("o", b"x")
    store = open_redis(f"redis://reader:s3cret@127.0.0.1:{server.port}")
    assert await store.get("o") == b"x"
    with pytest.raises(StorageWriteError, match="does not allow") as caught:
        await store.put("o", b"y")
    assert "s3cret" not in full_text(caught.value)


async def test_a_user_who_may_not_ask_about_the_server_can_still_work(start_redis: Start, open_redis: Open) -> None:
    server = start_redis()
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "worker", "on", ">pw", "~carrel:*", "+@all", "-@dangerous")
    store = open_redis(f"redis://worker:pw@127.0.0.1:{server.port}")
    assert await store.append("log", [b"1"], sync=True) == 1
    await store.put("o", b"x")
    assert list(await store.scan("")) == ["log", "o"]
    assert await store.delete("log")


async def test_a_server_that_throws_keys_away_when_full_is_refused(start_redis: Start, open_redis: Open) -> None:
    server = start_redis(maxmemory="50mb", maxmemory_policy="allkeys-lru")
    with pytest.raises(ConfigurationError, match="noeviction"):
        await open_redis(server.url).get("o")


async def test_a_server_that_a_script_keeps_busy_is_unavailable_and_nothing_is_written(
    start_redis: Start, open_redis: Open
) -> None:
    server = start_redis(lua_time_limit="50")
    store = open_redis(server.url)
    assert await store.append("log", [b"1"]) == 1
    with redis.Redis.from_url(server.url) as client, redis.Redis.from_url(server.url) as other:
        endless = asyncio.create_task(asyncio.to_thread(_refused, client, "while true do end"))
        await until(lambda: asyncio.to_thread(lambda: _refused(other, "return 1")[:4]), "BUSY")
        with pytest.raises(StorageUnavailable, match="not ready yet"):
            await store.append("log", [b"2"])
        with pytest.raises(StorageUnavailable, match="not ready yet"):
            await store.get("o")
        other.script_kill()
        await endless
    assert await store.append("log", [b"2"]) == 2


def _refused(client: Any, script: str) -> str:
    try:
        return str(client.eval(script, 0))
    except redis.exceptions.ResponseError as problem:
        return str(problem)


async def test_a_server_with_no_room_for_another_client_is_unavailable(start_redis: Start, open_redis: Open) -> None:
    server = start_redis(maxclients="1")
    with redis.Redis.from_url(server.url) as client:
        client.ping()
        with pytest.raises(StorageUnavailable, match="does not answer"):
            await open_redis(server.url).put("o", b"x")


async def test_a_log_that_vanished_from_the_server_is_reported(start_redis: Start, open_redis: Open) -> None:
    server = start_redis()
    store = open_redis(server.url)
    await store.append("log", [b"1"])
    with redis.Redis.from_url(server.url) as client:
        client.delete("carrel:log:log")
    with pytest.raises(StorageReadError, match="has lost the log"):
        await store.append("log", [b"2"])
    await store.delete("log")
    assert await store.append("log", [b"1"]) == 1


async def test_stores_of_different_prefixes_do_not_see_each_other(start_redis: Start, open_redis: Open) -> None:
    server = start_redis()
    one, other = open_redis(server.url, "one"), open_redis(server.url, "other")
    await one.put("o", b"1")
    await one.append("log", [b"1"])
    lock = await one.lock("s")
    assert lock
    assert await other.list() == []
    assert await other.get("o") is None
    assert await other.lock_owner("s") is None
    assert await other.append("log", [b"2"]) == 1
    await other.delete("log")
    assert await everything(one, "log") == [b"1"]
    await lock.release()


async def test_who_waits_for_an_answer_while_it_is_closed_gets_it(start_redis: Start, open_redis: Open) -> None:
    server = start_redis()
    store = open_redis(server.url)
    await store.put("o", b"x")
    for turns in range(20):
        puts = [asyncio.ensure_future(store.put(f"o{number}", bytes(100_000))) for number in range(10)]
        for _ in range(turns):
            await asyncio.sleep(0)
        await asyncio.gather(store.close(), *puts)
