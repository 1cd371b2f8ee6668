"""boto3, imported on first use, with its errors translated. Credentials stay inside boto3."""

import contextlib
from collections.abc import Iterator
from typing import Any

from peagle.errors import ConfigError, DeployError, MissingExtraError
from peagle.sagemaker.plan import Call

DENIED = frozenset({"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "AuthorizationError", "403"})
MISSING = frozenset({"404", "NoSuchBucket", "NoSuchEntity", "NoSuchKey", "NoSuchUpload", "ResourceNotFound"})
CREDENTIALS_HINT = "sign in (aws configure, aws sso login), or choose an account with --profile or AWS_PROFILE"


class AwsError(DeployError):
    """An error response from AWS; `code` is its error code."""

    def __init__(self, operation: str, code: str, message: str) -> None:
        hint = None
        if code in DENIED:
            hint = f"allow the signed-in user to call {operation}, or choose another account with --profile"
        elif code in ("ExpiredToken", "ExpiredTokenException", "InvalidClientTokenId", "UnrecognizedClientException"):
            hint = CREDENTIALS_HINT
        elif code == "ResourceLimitExceeded":
            hint = "request more under Service Quotas, or choose another --instance or --region"
        super().__init__(f"AWS refused {operation}: {message} ({code})", hint)
        self.code = code

    @property
    def is_denied(self) -> bool:
        return self.code in DENIED

    @property
    def is_missing(self) -> bool:
        """Whether the resource does not exist. SageMaker says so only in the message."""
        text = self.message.lower()
        in_message = self.code == "ValidationException" and ("could not find" in text or "does not exist" in text)
        return in_message or self.code in MISSING or self.code.endswith(("NotFound", "NotFoundException"))


class Aws(contextlib.AbstractContextManager["Aws"]):
    """Clients of one region and profile. Use it as a context manager: clients hold connections."""

    def __init__(self, region: str | None = None, profile: str | None = None) -> None:
        try:
            import boto3.exceptions
            import boto3.session
            import urllib3.exceptions
            from botocore import exceptions
        except ModuleNotFoundError as error:
            raise MissingExtraError("boto3", "deploy", "`peagle deploy sagemaker`") from error
        try:
            self._session = boto3.session.Session(region_name=region, profile_name=profile)
        except exceptions.ProfileNotFound as error:
            raise ConfigError(f"--profile {profile}: {error}") from error
        if self._session.region_name is None:
            raise ConfigError("no region", hint="pass --region, for example --region us-east-1, or set AWS_REGION")
        self.region: str = self._session.region_name
        self._clients: dict[str, Any] = {}
        self._exceptions, self._upload_error = exceptions, boto3.exceptions.S3UploadFailedError
        # boto3 does not wrap urllib3's errors while a stream is read.
        self._transport_error = urllib3.exceptions.HTTPError

    def __exit__(self, *_: object) -> None:
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    def client(self, service: str) -> Any:
        if service not in self._clients:
            from botocore.config import Config

            # An inference may take a minute; a retry would run it twice.
            attempts = 1 if service == "sagemaker-runtime" else 8
            config = Config(retries={"mode": "standard", "total_max_attempts": attempts}, read_timeout=70)
            self._clients[service] = self._session.client(service, config=config)
        return self._clients[service]

    def call(self, service: str, operation: str, **parameters: Any) -> dict[str, Any]:
        with self.explained(operation):
            answer: dict[str, Any] = getattr(self.client(service), operation)(**parameters)
            return answer

    def run(self, call: Call) -> dict[str, Any]:
        return self.call(call.service, call.operation, **call.parameters)

    def find(self, service: str, operation: str, **parameters: Any) -> dict[str, Any] | None:
        """Like `call`; None if the resource does not exist."""
        try:
            return self.call(service, operation, **parameters)
        except AwsError as error:
            if error.is_missing:
                return None
            raise

    def pages(self, service: str, operation: str, key: str, **parameters: Any) -> Iterator[Any]:
        """The items under `key`, over all pages."""
        with self.explained(operation):
            for page in self.client(service).get_paginator(operation).paginate(**parameters):
                yield from page.get(key, ())

    @contextlib.contextmanager
    def explained(self, operation: str) -> Iterator[None]:
        errors = self._exceptions
        try:
            yield
        except errors.ClientError as error:
            details = error.response.get("Error", {})
            raise AwsError(operation, str(details.get("Code", "?")), str(details.get("Message", error))) from error
        except (errors.NoCredentialsError, errors.PartialCredentialsError, errors.TokenRetrievalError) as error:
            raise DeployError(f"{operation} needs AWS credentials: {error}", hint=CREDENTIALS_HINT) from error
        except self._upload_error as error:
            raise DeployError(f"{operation} failed: {error}", hint="rerun the command to resume") from error
        except errors.ParamValidationError as error:
            raise DeployError(f"{operation} has invalid parameters: {error}") from error
        except (errors.BotoCoreError, self._transport_error) as error:
            raise DeployError(f"{operation} failed: {error}", hint="check the network and --region") from error

    def instance_types(self) -> tuple[str, ...]:
        """Instance types that endpoints support, from boto3's service model; no request."""
        shape = self._session._session.get_service_model("sagemaker").shape_for("ProductionVariantInstanceType")
        return tuple(shape.enum)

    def check_call(self, call: Call) -> None:
        """Validate a call against boto3's service model; no request."""
        from botocore.validate import ParamValidator

        if call.operation == "upload_file":
            return
        model = self._session._session.get_service_model(call.service)
        name = "".join(word.capitalize() for word in call.operation.split("_"))
        report = ParamValidator().validate(call.parameters, model.operation_model(name).input_shape)
        if report.has_errors():
            raise DeployError(f"{call.operation} has invalid parameters: {report.generate_report()}")
