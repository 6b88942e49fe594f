"""What a checkpoint must be to be loaded into a policy."""

from torch import Tensor

from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies import Policy


def check_same_policy(policy: Policy, state_dict: dict[str, Tensor]) -> None:
    """Refuse weights of another network.

    Args:
        policy: The network to load into.
        state_dict: A PPO module's, with the policy's entries under ``policy.``.

    Raises:
        ConfigurationError: The first entry that is missing, left over or of another shape.
    """
    saved = {
        key[len("policy.") :]: tensor.shape for key, tensor in state_dict.items() if key.startswith("policy.")
    }
    wanted = {key: tensor.shape for key, tensor in policy.state_dict().items()}
    for key in sorted(saved.keys() | wanted.keys()):
        if saved.get(key) != wanted.get(key):
            here, there = (str(tuple(of[key])) if key in of else "none" for of in (wanted, saved))
            raise ConfigurationError(
                f"ckpt_path holds another policy: {key} is {there} in the checkpoint and {here} in this run; "
                "use the model.policy, data.env and model.normalize_… options it was trained with."
            )
