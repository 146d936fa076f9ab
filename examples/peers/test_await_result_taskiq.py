from taskiq import InMemoryBroker

broker = InMemoryBroker()


@broker.task
async def greet(name: str) -> str:
    return f"Hello, {name}"


async def test_it_greets() -> None:  # delays are the scheduler's, which it does not run
    task = await greet.kiq(name="Ada")
    result = await task.wait_result(timeout=5)
    assert result.return_value == "Hello, Ada"
