from celery import Celery, chain, chord

app = Celery("app", broker="redis://127.0.0.1:6379/0", backend="redis://127.0.0.1:6379/0")


@app.task
def count_words(text: str) -> int:
    return len(text.split())


@app.task
def add_up(counts: list[int]) -> int:
    return sum(counts)


@app.task
def double(count: int) -> int:
    return 2 * count


if __name__ == "__main__":
    counts = [count_words.s(text) for text in ("to be", "or not to be")]
    print(chord(counts)(add_up.s()).get(timeout=30))
    print(chain(count_words.s("to be"), double.s())().get(timeout=30))
