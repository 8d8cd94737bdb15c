"""The protocols that ship, and their parameters, in one place."""

from __future__ import annotations

from nip_astra.protocols.adp import AdpProtocol as AdpProtocol
from nip_astra.protocols.debate import DebateProtocol as DebateProtocol
from nip_astra.protocols.merlin_arthur import MerlinArthurProtocol as MerlinArthurProtocol
from nip_astra.protocols.mnip import MnipProtocol as MnipProtocol
from nip_astra.protocols.multi_channel_test import (
    MultiChannelTestProtocol as MultiChannelTestProtocol,
)
from nip_astra.protocols.nip import NipProtocol as NipProtocol
from nip_astra.protocols.solo_verifier import SoloVerifierProtocol as SoloVerifierProtocol

NipProtocolParameters = NipProtocol.Parameters
DebateProtocolParameters = DebateProtocol.Parameters
MnipProtocolParameters = MnipProtocol.Parameters
