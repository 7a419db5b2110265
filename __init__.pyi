# SPDX-License-Identifier: Apache-2.0
from .client import AsyncClient as AsyncClient
from .client import Client as Client
from .client.errors import ApiRefused as ApiRefused
from .client.errors import ClientError as ClientError
from .client.errors import DaemonUnreachable as DaemonUnreachable
from .client.errors import RequestFailed as RequestFailed
from .client.errors import SessionError as SessionError
from .env_host.environment.interfaces import Action as Action
from .env_host.environment.interfaces import Environment as Environment
from .env_host.environment.interfaces import EnvironmentMetadata as EnvironmentMetadata
from .env_host.environment.interfaces import Observation as Observation
from .env_host.environment.interfaces import State as State

__version__: str
