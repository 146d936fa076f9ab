from await_result_celery import greet
from flask import Flask

app = Flask(__name__)


@app.post("/greetings/<name>")
def greeting(name: str) -> dict[str, str]:
    return {"text": greet.delay(name).get(timeout=30)}
