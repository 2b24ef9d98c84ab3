"""Secrets are removed from URLs, commands and texts."""

import re
import shlex
import subprocess
import sys
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cope_sweep.errors import UserError
from cope_sweep.redaction import has_secrets, redacted, redacted_command, redacted_url

# None of the parts of the URLs below contains this mark, so what is left of a secret is found by it.
MARK = "Zq7"
CHARACTERS = st.characters(codec="utf-8", exclude_categories=("Cs",))
SECRETS = st.lists(st.sampled_from([*"/[]@%?#&=:;,' \"\\<>()", "é", "%40", "://", "\n", "a"]) | CHARACTERS).map(
    lambda parts: MARK + MARK.join(parts) + MARK
)
WORDS = st.text("abcdefghijklmnopqrstuvwxyz0123456789_", min_size=1, max_size=8)
SCHEMES = st.sampled_from(["postgresql", "postgresql+psycopg", "http", "https", "s3", "gs", "mysql", "jdbc:postgresql"])
KEYS = st.sampled_from(
    ["password", "PassWord", "pass%77ord", "sslkey", "token", "access_token", "client_secret", "pwd"]
)


@st.composite
def urls_with_secrets(draw):
    """A URL with secrets that are escaped, or not."""
    secret = draw(SECRETS)
    if draw(st.booleans()):
        secret = quote(secret, safe="")
    user, host, key = draw(WORDS), draw(WORDS), draw(KEYS)
    end = draw(st.sampled_from(["", "/", "/name", ":5432/name", "/name?sslmode=require", ",other:5433/name"]))
    form = draw(st.sampled_from(["password", "token", "user", "query", "both", "later"]))
    question = "&" if "?" in end else "?"
    server = {
        "password": f"{user}:{secret}@{host}{end}",
        "token": f"{secret}@{host}{end}",
        "user": f"{secret}:@{host}{end}",
        "query": f"{host}{end}{question}user={user}&{key}={secret}",
        "both": f"{user}:{secret}@{host}{end}{question}{key}={secret}",
        "later": f"{host}{end}{question}{key}={secret}&x=1",
    }[form]
    return f"{draw(SCHEMES)}://{server}"


@given(urls_with_secrets())
def test_no_part_of_a_secret_is_left_of_a_url(url):
    shown = redacted_url(url)
    assert MARK not in shown
    assert redacted_url(shown) == shown
    assert has_secrets(url)


@given(urls_with_secrets(), st.sampled_from(["{}", "--index={}", "COPE_SWEEP_INDEX={}", "x {}"]))
def test_no_part_of_a_secret_is_left_of_a_command(url, form):
    for command in (["cope-sweep", "run", form.format(url)], ["cope-sweep", "run", "--index", url, "--local"]):
        shown = redacted_command(command)
        assert MARK not in shlex.join(shown)
        assert shown[:2] == command[:2]
        assert len(shown) == len(command)
        assert redacted_command(shown) == shown


@given(urls_with_secrets().filter(lambda url: not any(map(str.isspace, url))))
def test_no_part_of_a_secret_is_left_of_a_text(url):
    for form in ("the index {} does not answer", "('{}', 1)", '{{"uri":"{}"}}', "[{}]", "{}", "http://a:1 {}; {}."):
        assert MARK not in redacted(form.format(url, url))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:p@h/n", "postgresql://***@h/n"),
        ("postgresql://u@h:5432/n", "postgresql://***@h:5432/n"),
        ("postgresql://u:p@/n?host=/run/pg", "postgresql://***@/n?host=/run/pg"),
        ("postgresql://h1:1,h2:2/n?user=u&password=p", "postgresql://h1:1,h2:2/n?***"),
        ("postgresql://u:a/b@h/n", "postgresql://***"),
        ("postgresql://u:a@b@h/n", "postgresql://***"),
        ("postgresql://u:1?a@h/n", "postgresql://***"),
        ("postgresql://u:p[@h/n", "postgresql://***"),
        ("https://t0ken@[::1]:5000", "https://***@[::1]:5000"),
        ("http://127.0.0.1:5000/#/experiments/1", "http://127.0.0.1:5000/#/experiments/1"),
        ("sqlite:////home/me@work/index.db", "sqlite:////home/me@work/index.db"),
        ("sqlite://", "sqlite://"),
        ("s3://KEY:SECRET@bucket/prefix?region=eu", "s3://***@bucket/prefix?region=eu"),
        ("s3://bucket/prefix", "s3://bucket/prefix"),
        ("u:p@h/n", "***"),
        ("host=h password=p", "***"),
        ("./mlruns", "./mlruns"),
        ("nonsense", "nonsense"),
    ],
)
def test_what_is_shown_of_a_url(url, shown):
    assert redacted_url(url) == shown


@pytest.mark.parametrize(
    "text",
    [
        "no server at http://127.0.0.1:5000 (refused); start one, or see 'https://host/a?b=c'.",
        "accepted: sqlite:///PATH, or http://HOST:PORT or https://HOST of an MLflow server",
        "write it as http://HOST:8265, or s3://…, gs://… and s3://BUCKET/PREFIX?endpoint_override=HOST:PORT",
        '{"uri":"http://h:5000","x":1}',
        "(http://[::1]:8000)",
        "/folder/me@here a@b x://",
    ],
)
def test_texts_without_secrets_stay(text):
    assert redacted(text) == text


def test_errors_have_no_secrets():
    error = UserError("no answer of http://me:secret@h", url="http://me:secret@h", more=["x http://a:secret@b"])
    assert (str(error), error.data) == (
        "no answer of http://***@h",
        {"url": "http://***@h", "more": ["x http://***@b"]},
    )


PROGRAM = """
import logging, sys, threading, urllib.parse
from cope_sweep.redaction import redacted, remember
logging.basicConfig()
secret = "s3cret/w%rd é"
remember(sys.argv[1])
remember("postgresql://cope_sweep:cope@h/cope_sweep")
print(redacted(f"{secret} {secret!r} {urllib.parse.quote(secret)} {urllib.parse.quote_plus(secret)} {sys.argv[1]}"))
print(redacted("the user cope_sweep of cope-sweep with the password cope"))
logging.getLogger("x").warning("refused: %s", secret)
try:
    raise ValueError(secret)
except ValueError:
    logging.getLogger("x").exception("failed")
thread = threading.Thread(target=lambda: {}[secret])
thread.start()
thread.join()
raise KeyError(secret)
"""


@pytest.mark.slow
def test_known_secrets_are_removed_from_texts_logs_and_tracebacks():
    url = f"postgresql://u:{quote('s3cret/w%rd é', safe='')}@h/n"
    done = subprocess.run([sys.executable, "-c", PROGRAM, url], capture_output=True, text=True, check=False)
    assert "the user cope_sweep of cope-sweep with the password ***" in done.stdout, done.stderr
    assert done.stderr.count("Traceback") == 3
    assert not re.search("s3cret|w%", done.stdout + done.stderr)
