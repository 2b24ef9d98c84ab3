"""Processes of a measurement that goes wrong. They import neither torch nor anything else that takes seconds."""

import os
import signal

from cope_sweep.errors import UserError


def cannot_read_its_data(connection, *settings):
    connection.recv_bytes()
    connection.send(UserError("no such text", code="no_corpus", corpus="mine"))


def dies_of_memory(connection, *settings):
    connection.recv_bytes()
    os.kill(os.getpid(), signal.SIGKILL)


def crashes(connection, *settings):
    connection.recv_bytes()
    os.kill(os.getpid(), signal.SIGSEGV)
