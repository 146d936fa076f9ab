from celery import Celery

app = Celery("app", broker="redis://127.0.0.1:6379/0", backend="redis://127.0.0.1:6379/0")


@app.task(bind=True, max_retries=3)
def fetch(self, url: str) -> int:
    attempt = self.request.retries + 1
    if attempt < 3:
        raise self.retry(countdown=0.1 * attempt**2, exc=ConnectionError(url))
    return attempt


if __name__ == "__main__":
    print("attempt", fetch.delay("http://example.org").get(timeout=30))
