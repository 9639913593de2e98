"""Train as llamafactory.yaml says, with states and parameters on SSD.

python llamafactory_train.py llamafactory.yaml
"""

import lohan
from llamafactory.train.tuner import run_exp

if __name__ == "__main__":
    run_exp(callbacks=[lohan.TrainerCallback(store="store", host_bytes="100MB")])
