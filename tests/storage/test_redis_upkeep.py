"""RedisStore: connections and event loops, released memory, renewed locks, sync, and the missing extra."""

import asyncio
import json
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from carrel.errors import StorageUnavailable
from carrel.storage.redis.store import RedisStore
from tests.support.lazy_module import LazyModule
from tests.support.real_redis import RealRedis
from tests.support.stores import Listener, in_a_thread, until

redis = LazyModule("redis")

Start = Callable[..., RealRedis]
Open = Callable[..., RedisStore]


async def test_close_leaves_no_connection_and_a_delete_nothing_that_stays(start_redis: Start) -> None:
    server = start_redis()
    store = RedisStore(server.url)
    await asyncio.gather(*[store.append("s/log", [b"x" * 50_000]) for _ in range(40)])
    await store.put("s/o", b"x")
    assert await store.lock("s")
    listener = Listener(store, "s/log", 41)
    await asyncio.sleep(0.1)
    await listener.stop()
    await store.delete("s")
    await store.close()
    with redis.Redis.from_url(server.url) as client:
        # The server takes a moment to notice that a line was closed.
        await until(lambda: asyncio.to_thread(lambda: len(client.client_list())), 1)
        lasting = {key for key in client.scan_iter() if client.ttl(key) == -1}
    assert lasting == {b"carrel:state"}


async def test_many_appends_at_once_need_few_connections(start_redis: Start, open_redis: Open) -> None:
    server = start_redis()
    store = open_redis(server.url)
    await asyncio.gather(*[store.append("log", [b"x"]) for _ in range(500)])
    with redis.Redis.from_url(server.url) as client:
        assert len(client.client_list()) < 30


async def test_a_store_serves_one_loop_after_another(start_redis: Start) -> None:
    server = start_redis()
    store = RedisStore(server.url)

    async def work() -> int:
        number = await store.append("log", [b"x"])
        await store.close()
        return number

    assert [await in_a_thread(work) for _ in range(4)] == [1, 2, 3, 4]


async def test_a_loop_that_ends_takes_its_connections_with_it(start_redis: Start) -> None:
    server = start_redis()
    store = RedisStore(server.url)

    async def work() -> int:
        return await store.append("log", [b"x"])

    assert [await in_a_thread(work) for _ in range(3)] == [1, 2, 3]
    with redis.Redis.from_url(server.url) as client:
        await until(lambda: asyncio.to_thread(lambda: len(client.client_list())), 1)


async def test_close_also_closes_what_other_threads_use(start_redis: Start) -> None:
    server = start_redis()
    store = RedisStore(server.url)
    used, finish = threading.Event(), threading.Event()

    async def work() -> None:
        await store.append("log", [b"x"])
        used.set()
        await asyncio.to_thread(finish.wait)

    working = asyncio.ensure_future(in_a_thread(work))
    await asyncio.to_thread(used.wait)
    await store.append("log", [b"x"])
    await store.close()
    with redis.Redis.from_url(server.url) as client:
        await until(lambda: asyncio.to_thread(lambda: len(client.client_list())), 1)
    finish.set()
    await working


async def test_a_lock_is_kept_as_long_as_its_holder_lives(start_redis: Start, open_redis: Open) -> None:
    server = start_redis()
    store = open_redis(server.url)
    lock = await store.lock("s")
    assert lock
    with redis.Redis.from_url(server.url) as client:
        life = client.pttl("carrel:lock:s")
        await asyncio.sleep(life / 1000 + 1)
        assert 0 < client.pttl("carrel:lock:s") <= life
    assert await open_redis(server.url).lock("s", wait=False) is None
    await lock.release()


async def test_a_lock_that_another_process_took_is_lost_and_not_taken_back(
    start_redis: Start, open_redis: Open, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_redis()
    store = open_redis(server.url)
    lock = await store.lock("s")
    assert lock
    with redis.Redis.from_url(server.url) as client:
        client.set("carrel:lock:s", "elsewhere:1 token")
    await asyncio.wait_for(lock.lost.wait(), 30)
    assert "was lost" in caplog.text
    await lock.release()
    assert await store.lock_owner("s") == "elsewhere:1"


async def test_a_lock_that_a_restarted_server_has_forgotten_is_lost(start_redis: Start, open_redis: Open) -> None:
    server = start_redis()
    store = open_redis(server.url)
    lock = await store.lock("s")
    assert lock
    server.kill()
    server.start()
    await asyncio.wait_for(lock.lost.wait(), 30)
    await lock.release()
    again = await store.lock("s")
    assert again
    assert not again.lost.is_set()
    await again.release()


async def test_who_closes_when_the_server_is_gone_holds_nothing_when_it_is_back(
    start_redis: Start, open_redis: Open
) -> None:
    server = start_redis()
    store, other = open_redis(server.url), open_redis(server.url)
    for key in ("a", "b", "c"):
        assert await store.lock(key)
    server.kill()
    with pytest.raises(StorageUnavailable):
        await store.close()
    server.start()
    await until(lambda: other.list(), [])
    await asyncio.sleep(2)  # longer than it takes to renew one
    assert [await other.lock_owner(key) for key in ("a", "b", "c")] == [None, None, None]


@pytest.mark.slow
async def test_a_process_that_is_frozen_for_longer_than_its_lock_lives_does_not_win_when_it_wakes(
    start_redis: Start, open_redis: Open
) -> None:
    server = start_redis()
    store = open_redis(server.url)
    address = json.dumps(["tests.support.stores:redis_store", server.url, "carrel"])
    command = [sys.executable, "-m", "tests.support.store_process", address, "replace_locked"]
    program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    assert await asyncio.to_thread(program.stdout.readline) == "holds\n"
    program.send_signal(signal.SIGSTOP)
    theirs = await store.lock("s")
    assert theirs
    await store.put("o", b"ours")
    await theirs.release()
    program.send_signal(signal.SIGCONT)
    out, _ = await asyncio.to_thread(program.communicate, "go on\n")
    assert out == "refused\n"
    assert await store.get("o") == b"ours"


async def test_sync_waits_for_the_file_where_the_server_can_tell_and_warns_where_not(
    start_redis: Start, open_redis: Open, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_redis(appendonly="yes", appendfsync="everysec")
    store = open_redis(server.url)
    assert await store.append("log", [b"1"]) == 1
    assert await store.append("log", [b"2", b"3"], sync=True) == 3
    with pytest.raises(KeyError):
        await store.append("none", [b"x"], sync=True, create=False)
    with redis.Redis.from_url(server.url) as client:
        able = tuple(map(int, client.info("server")["redis_version"].split(".")[:2])) >= (7, 2)
        assert ("cmdstat_waitaof" in client.info("commandstats")) == able
    assert ("appendfsync always" in caplog.text) != able


async def test_sync_on_a_server_without_a_file_is_warned_about_once(
    start_redis: Start, open_redis: Open, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_redis(start_redis().url)
    with caplog.at_level(logging.WARNING, "carrel.storage"):
        for number in (1, 2, 3):
            assert await store.append("log", [b"x"], sync=True) == number
    assert caplog.text.count("may not survive a power cut") == 1
    assert "appendonly no" in caplog.text


def test_without_the_redis_package_carrel_works_and_a_redis_store_says_what_to_install() -> None:
    program = """
import sys
sys.modules["redis"] = None  # as if it were not installed
import carrel
from carrel.errors import StorageUnavailable
from carrel.storage.redis.store import RedisStore
try:
    RedisStore("redis://localhost")
except carrel.errors.ConfigurationError as error:
    print(error)
"""
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "pip install 'carrel-sessions[redis]'" in output


def test_importing_the_redis_store_does_not_load_the_redis_package() -> None:
    program = "import sys, carrel.storage.redis.store; print('redis' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "False\n"
    )
