"""boto3, loaded when it is first needed, with its errors in our words. Credentials stay inside it."""

import contextlib
from collections.abc import Iterator
from typing import Any, Self

from peagle.deploy.sagemaker.plan import Call
from peagle.errors import ConfigError, DeployError, MissingExtraError

DENIED = frozenset({"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "AuthorizationError", "403"})
MISSING = frozenset({"404", "NoSuchBucket", "NoSuchEntity", "NoSuchKey", "NoSuchUpload", "ResourceNotFound"})
CREDENTIALS_HINT = "sign in (aws configure, aws sso login), or choose an account with --profile or AWS_PROFILE"
PURPOSE = "`peagle deploy sagemaker`"


class AwsError(DeployError):
    """AWS answered a call with an error. `code` is its own word for it."""

    def __init__(self, operation: str, code: str, message: str) -> None:
        hint = None
        if code in DENIED:
            hint = f"let whoever is signed in call {operation}, or choose another account with --profile"
        elif code in ("ExpiredToken", "ExpiredTokenException", "InvalidClientTokenId", "UnrecognizedClientException"):
            hint = CREDENTIALS_HINT
        elif code == "ResourceLimitExceeded":
            hint = "ask for more under Service Quotas, or choose another --instance or --region"
        super().__init__(f"AWS refused {operation}: {message} ({code})", hint)
        self.code = code

    @property
    def is_denied(self) -> bool:
        return self.code in DENIED

    @property
    def is_missing(self) -> bool:
        """Whether what was asked for does not exist. SageMaker says so in words alone."""
        text = self.message.lower()
        is_said = self.code == "ValidationException" and ("could not find" in text or "does not exist" in text)
        return is_said or self.code in MISSING or self.code.endswith(("NotFound", "NotFoundException"))


class Aws:
    """The clients of one region and profile. Use it as a context manager: clients hold connections."""

    def __init__(self, region: str | None = None, profile: str | None = None) -> None:
        boto3, exceptions, urllib3 = _boto3()
        try:
            self._session = boto3.session.Session(region_name=region, profile_name=profile)
        except exceptions.ProfileNotFound as error:
            raise ConfigError(f"--profile {profile}: {error}") from error
        if self._session.region_name is None:
            raise ConfigError(
                "no region is given", hint="use --region, for example --region us-east-1, or set AWS_DEFAULT_REGION"
            )
        self.region: str = self._session.region_name
        self._clients: dict[str, Any] = {}
        self._exceptions, self._upload_error = exceptions, boto3.exceptions.S3UploadFailedError
        # Streams are read from urllib3 itself, whose errors boto3 passes on as they are.
        self._transport_error = urllib3.exceptions.HTTPError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    def client(self, service: str) -> Any:
        if service not in self._clients:
            from botocore.config import Config

            # An answer of the runtime may take a minute; asking twice would have it made twice.
            attempts = 1 if service == "sagemaker-runtime" else 8
            config = Config(retries={"mode": "standard", "total_max_attempts": attempts}, read_timeout=70)
            self._clients[service] = self._session.client(service, config=config)
        return self._clients[service]

    def call(self, service: str, operation: str, **parameters: Any) -> dict[str, Any]:
        with self.explained(operation):
            answer: dict[str, Any] = getattr(self.client(service), operation)(**parameters)
            return answer

    def pages(self, service: str, operation: str, key: str, **parameters: Any) -> Iterator[Any]:
        """The elements under `key` of all pages of a list."""
        with self.explained(operation):
            client = self.client(service)
            if not client.can_paginate(operation):
                yield from getattr(client, operation)(**parameters).get(key, ())
                return
            for page in client.get_paginator(operation).paginate(**parameters):
                yield from page.get(key, ())

    @contextlib.contextmanager
    def explained(self, operation: str) -> Iterator[None]:
        errors = self._exceptions
        try:
            yield
        except errors.ClientError as error:
            told = error.response.get("Error", {})
            raise AwsError(operation, str(told.get("Code", "?")), str(told.get("Message", error))) from error
        except (errors.NoCredentialsError, errors.PartialCredentialsError, errors.TokenRetrievalError) as error:
            raise DeployError(f"{operation} needs AWS credentials: {error}", hint=CREDENTIALS_HINT) from error
        except self._upload_error as error:
            raise DeployError(f"{operation} failed: {error}", hint="the same command goes on from there") from error
        except errors.ParamValidationError as error:
            raise DeployError(f"{operation} would be refused: {error}") from error
        except (errors.BotoCoreError, self._transport_error) as error:
            raise DeployError(f"{operation} failed: {error}", hint="check the network and --region") from error

    def instance_types(self) -> tuple[str, ...]:
        """The instance types that an endpoint may have, by the service's own description; asks nobody."""
        shape = self._session._session.get_service_model("sagemaker").shape_for("ProductionVariantInstanceType")
        return tuple(shape.enum)

    def check_call(self, call: Call) -> None:
        """Hold a call against the service's description, as boto3 would before it sent it; asks nobody."""
        from botocore.validate import ParamValidator

        if call.operation == "upload_file":
            return
        model = self._session._session.get_service_model(call.service)
        name = "".join(word.capitalize() for word in call.operation.split("_"))
        report = ParamValidator().validate(call.parameters, model.operation_model(name).input_shape)
        if report.has_errors():
            raise DeployError(f"{call.operation} would be refused: {report.generate_report()}")


def _boto3() -> tuple[Any, Any, Any]:
    try:
        import boto3.exceptions
        import boto3.session
        import urllib3.exceptions
        from botocore import exceptions
    except ModuleNotFoundError as error:
        raise MissingExtraError("boto3", "deploy", PURPOSE) from error
    return boto3, exceptions, urllib3
