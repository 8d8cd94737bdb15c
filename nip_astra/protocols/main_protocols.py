"""The shipped protocols under NIP's module path."""

from nip_astra.protocols.library import AdpProtocol as AdpProtocol
from nip_astra.protocols.library import DebateProtocol as DebateProtocol
from nip_astra.protocols.library import DebateProtocolParameters as DebateProtocolParameters
from nip_astra.protocols.library import MerlinArthurProtocol as MerlinArthurProtocol
from nip_astra.protocols.library import MnipProtocol as MnipProtocol
from nip_astra.protocols.library import MnipProtocolParameters as MnipProtocolParameters
from nip_astra.protocols.library import MultiChannelTestProtocol as MultiChannelTestProtocol
from nip_astra.protocols.library import NipProtocol as NipProtocol
from nip_astra.protocols.library import NipProtocolParameters as NipProtocolParameters
from nip_astra.protocols.library import SoloVerifierProtocol as SoloVerifierProtocol
