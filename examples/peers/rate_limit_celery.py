import time

from celery import Celery, group

app = Celery("app", broker="redis://127.0.0.1:6379/0", backend="redis://127.0.0.1:6379/0")


@app.task(rate_limit="2/s")  # of each worker, not of the queue
def call(number: int) -> float:
    return time.time()


if __name__ == "__main__":
    times = sorted(group(call.s(n) for n in range(5))().get(timeout=30))
    print(f"five jobs took {times[-1] - times[0]:.0f} s")
