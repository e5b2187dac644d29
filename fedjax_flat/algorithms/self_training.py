"""Self-training: clients without labels learn from what models already say of their examples.

The local loss of LADD (Shenaj et al., "Learning across domains and devices", WACV 2023), as Fani's
thesis prints it (eq. 5.18 to 5.21); p is softmax of the model's logits, a unit a pixel or an
example, means are over all units of real examples:

    f_k(w)  =  entropy L_E  +  L_CE  +  teacher L_TS
    L_E = - sum p log p        L_CE = - log p_y,   y the pseudo-label, 0 where there is none
    L_TS = KL(p || p of the teacher)

By itself it is the papers' baseline "FedAvg + self-training": the teacher is the model that the
client received. Pseudo-labels are the most probable classes of the model itself (`labels` =
student, as printed) or of the teacher (Caldarola's thesis, the released program), where trusted:

    threshold   confidence above `threshold`
    fda         confidence at least min(threshold, the share-quantile of the class in the batch)
                (Yang and Soatto, "FDA", CVPR 2020, per batch instead of the whole set)
    released    confidence above `threshold`, or among the `share` most confident units of that
                class in the example

The released program has neither L_E nor L_TS: `entropy` = `teacher` = 0, `labels` = teacher, `rule`
= released. Labels are never trained on; where there are some, the loss and the score that cohorts
report are of them.
"""

from typing import Any

from fedjax_flat import parts
from fedjax_flat.algorithms.addition import Addition, with_term
from fedjax_flat.algorithms.method import Method
from fedjax_flat.client import Term
from fedjax_flat.client import unlabelled as ul


def self_training(**own: Any) -> Addition:
    """Clients that learn from pseudo-labels, taught by the model that they received."""

    def teach(client, anchor, data):
        def of(outputs, batch, taught):
            return ul.loss(outputs.logits, taught, batch.mask, own)

        return Term(of, ul.logits_of(client.task, parts.put(anchor, data.own)))

    return Addition(lambda client: with_term(teach)(ul.unlabelled(client)))


METHOD = Method(
    "self_training", "Shenaj 2023", "pseudo-labels instead of labels",
    add=lambda settings: self_training(**settings), settings=ul.SETTINGS,
)
