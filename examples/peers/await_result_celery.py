from celery import Celery

app = Celery("app", broker="redis://127.0.0.1:6379/0", backend="redis://127.0.0.1:6379/0")


@app.task
def greet(name: str) -> str:
    return f"Hello, {name}"


if __name__ == "__main__":
    print(greet.delay("Ada").get(timeout=30))
