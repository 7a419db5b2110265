# SPDX-License-Identifier: Apache-2.0
from .client.errors import ApiRefused as ApiRefused
from .client.errors import ClientError as ClientError
from .client.errors import DaemonUnreachable as DaemonUnreachable
from .client.errors import RequestFailed as RequestFailed
from .client.errors import SessionError as SessionError
from .sdk import AsyncClient as AsyncClient
from .sdk import Client as Client

__version__: str
