"""Submit and await from Flask, without an event loop. Run it:

tenure worker await_result.py
flask --app flask_app run
"""

from await_result import greet
from flask import Flask

from tenure.sync import Client

app = Flask(__name__)
client = Client.from_env()


@app.post("/greetings/<name>")
def greeting(name: str) -> dict[str, str]:
    return {"text": client.submit(greet, name=name).result(timeout_s=30)}
