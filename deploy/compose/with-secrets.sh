#!/bin/sh
# Runs a command with the addresses of the databases, which hold the password of a secret file.
set -eu
password=$(cat "${POSTGRES_PASSWORD_FILE:-/run/secrets/postgres_password}")
server="cope:$password@${POSTGRES_HOST:-postgres:5432}"
export COPE_SWEEP_INDEX="postgresql://$server/cope_sweep"
export MLFLOW_BACKEND_STORE_URI="postgresql+psycopg://$server/mlflow"
exec "$@"
