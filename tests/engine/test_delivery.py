from __future__ import annotations

import asyncio
import threading

import pytest

from engine.delivery import ClientGone, Delivery, Inbox
from engine.sequence import GenerationEvent


def event(text: str, token: int, finish_reason: str | None = None) -> GenerationEvent:
    return GenerationEvent(text, (token,), finish_reason, None, 3, token, 1)


def ignore(event: GenerationEvent, now: float) -> None:
    pass


def test_slow_reader_finds_one_event_that_holds_everything():
    async def read():
        inbox = Inbox(Delivery(asyncio.get_running_loop()), ignore)
        for token in range(1, 5000):
            inbox.put(event("ab", token))
        inbox.put(event("!", 5000, "stop"))
        return await inbox.next()

    merged = asyncio.run(read())
    assert merged.text == "ab" * 4999 + "!"
    assert merged.token_ids == tuple(range(1, 5001))
    assert (merged.finish_reason, merged.completion_tokens) == ("stop", 5000)


def test_a_step_wakes_the_loop_once_for_all_its_requests():
    async def run() -> int:
        loop, wakes = asyncio.get_running_loop(), 0
        delivery = Delivery(loop)
        inboxes = [Inbox(delivery, ignore) for _ in range(16)]
        wake = loop.call_soon_threadsafe

        def counted(*arguments):
            nonlocal wakes
            wakes += 1
            return wake(*arguments)

        loop.call_soon_threadsafe = counted

        def step():
            for inbox in inboxes:
                inbox.deliver(event("x", 1))
            delivery.send()

        await asyncio.to_thread(step)
        wakes = wakes - 1  # the end of the thread itself
        assert [(await inbox.next()).text for inbox in inboxes] == ["x"] * 16
        return wakes

    assert asyncio.run(run()) == 1


def test_events_of_many_threads_arrive_in_order_and_none_is_lost():
    async def run() -> list[str]:
        delivery = Delivery(asyncio.get_running_loop())
        inboxes = [Inbox(delivery, ignore) for _ in range(4)]

        def post(inbox):
            for token in range(1, 500):
                inbox.deliver(event(f"{token},", token))
                delivery.send()
            inbox.deliver(event("", 500, "stop"))
            delivery.send()

        threads = [threading.Thread(target=post, args=(inbox,)) for inbox in inboxes]
        for thread in threads:
            thread.start()
        texts = []
        for inbox in inboxes:
            text, last = "", None
            while last is None or not last.finish_reason:
                last = await asyncio.wait_for(inbox.next(), 10)
                text += last.text
            texts.append(text)
        return texts

    whole = "".join(f"{token}," for token in range(1, 500))
    assert asyncio.run(run()) == [whole] * 4


def test_client_that_goes_wakes_whoever_waits_for_its_next_event():
    async def run():
        inbox = Inbox(Delivery(asyncio.get_running_loop()), ignore)
        waiting = asyncio.create_task(inbox.next())
        await asyncio.sleep(0)
        inbox.fail(ClientGone())
        await asyncio.wait_for(waiting, 5)

    with pytest.raises(ClientGone):
        asyncio.run(run())


def test_inboxes_that_are_open_fail_together_and_closed_ones_are_forgotten():
    async def run():
        delivery = Delivery(asyncio.get_running_loop())
        with pytest.raises(ValueError), delivery.inbox(ignore) as closed:
            raise ValueError
        with delivery.inbox(ignore) as inbox:
            delivery.fail_all(ClientGone())
            with pytest.raises(ClientGone):
                await asyncio.wait_for(inbox.next(), 5)
        closed.put(event("late", 1))
        assert (await closed.next()).text == "late"

    asyncio.run(run())


def test_events_gather_until_the_last_comes_or_the_time_is_over():
    async def run():
        inbox = Inbox(Delivery(asyncio.get_running_loop()), ignore)
        await inbox.gather(0.01)
        inbox.put(event("a", 1))
        await inbox.gather(3600)  # somebody waits for it
        assert (await inbox.next()).text == "a"
        gathering = asyncio.create_task(inbox.gather(3600))
        await asyncio.sleep(0)
        inbox.put(event("b", 2))
        await asyncio.sleep(0)
        assert not gathering.done()
        inbox.put(event("c", 3, "stop"))
        await gathering
        assert (await inbox.next()).text == "bc"

    asyncio.run(run())


def test_failure_ends_the_gathering():
    async def run():
        inbox = Inbox(Delivery(asyncio.get_running_loop()), ignore)
        gathering = asyncio.create_task(inbox.gather(3600))
        await asyncio.sleep(0)
        inbox.fail(ClientGone())
        await gathering

    asyncio.run(run())
