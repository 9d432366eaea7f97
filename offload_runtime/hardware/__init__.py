"""Machines: what their link, memories and processors can do, measured here or from a named file.

Measuring itself is in `hardware.measure`, which needs torch; reading profiles does not.
"""

from offload_runtime.hardware.profile import (
    Emulation,
    MachineProfile,
    check_name,
    list_profiles,
    load_profile,
    own_directory,
    profile_of_gpu,
    profile_to_mapping,
    profile_toml,
    save_profile,
)
