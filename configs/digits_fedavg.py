"""FedAvg on the embedded digits, 20 clients, Dirichlet 0.5.

command: fedjax-flat train --config configs/digits_fedavg.py --run runs/digits
"""

from fedjax_flat import default_config


def get_config():
    return default_config()
