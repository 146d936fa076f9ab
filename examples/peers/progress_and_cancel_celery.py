import time

from celery import Celery

app = Celery("app", broker="redis://127.0.0.1:6379/0", backend="redis://127.0.0.1:6379/0")


@app.task(bind=True)
def count(self, upto: int) -> int:
    for number in range(upto):
        self.update_state(state="PROGRESS", meta={"at": number})
        time.sleep(0.1)
    return upto


if __name__ == "__main__":
    result = count.delay(1_000)
    while result.state != "PROGRESS" or result.info["at"] < 3:
        time.sleep(0.05)
    print("at", result.info["at"])
    result.revoke(terminate=True)  # kills the process of the worker
    while not result.ready():
        time.sleep(0.05)
    print(result.state)
