# SPDX-License-Identifier: Apache-2.0
from .client import AsyncClient as AsyncClient
from .client import Client as Client
from .client.errors import ApiRefused as ApiRefused
from .client.errors import ClientError as ClientError
from .client.errors import DaemonUnreachable as DaemonUnreachable
from .client.errors import RequestFailed as RequestFailed
from .client.errors import SessionError as SessionError

__version__: str
