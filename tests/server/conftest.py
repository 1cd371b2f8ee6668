"""A server for each module of tests, and a question for it."""

from harness.local_server import chat_body as chat_body
from harness.local_server import served as served
