"""Makes a bucket of the object store, if there is none: python make_bucket.py NAME.

Keys and address are in AWS's environment variables.
"""

import sys

import boto3
from botocore.exceptions import ClientError

(name,) = sys.argv[1:]
client = boto3.client("s3")
try:
    client.head_bucket(Bucket=name)
except ClientError as error:
    if error.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
        raise
    client.create_bucket(Bucket=name)
