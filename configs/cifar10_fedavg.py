"""FedAvg with the paper's CNN on CIFAR-10 (thesis, sections 4.3 and A.1).

command: fedjax-flat train --config configs/cifar10_fedavg.py --run runs/c10 --data FOLDER
"""

from fedjax_flat import default_config


def get_config():
    c = default_config()
    c.rounds = 10_000
    c.data.name = "cifar10"
    c.data.crop_padding, c.data.flip = 4, True
    c.partition.clients, c.partition.alpha = 100, 100.0
    c.model.name = "cnn"
    c.client.learning_rate, c.client.weight_decay, c.client.batch_size = 0.01, 4e-4, 64
    c.cohort.size = 10
    c.eval.every, c.eval.window = 100, 100
    c.checkpoint.every = 100
    return c
