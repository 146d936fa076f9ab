"""Tests of a task without Redis, with all that client and worker do. Run it: pytest"""

from await_result import greet

from tenure.testing import serving


async def test_it_greets_tomorrow() -> None:
    async with serving(greet) as queue:
        handle = await queue.client.submit(greet.call(name="Ada"), delay_s=86_400)
        queue.clock.advance(86_400)
        assert await handle.result(timeout_s=5) == "Hello, Ada"
