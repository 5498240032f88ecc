"""What the tests of Skip Blocks share: a sampling run, and what is known of the models of ``tools.architectures``."""

RUN = {"width": 72, "height": 56, "steps": 12}  # of bench.models.sample; odd latent sides
BLOCKS = 5  # in each list of blocks of a transformer
# Their first block lays the stream out in another order, so it always runs, and the last one with it.
FIRST_RUNS = ("WAN21_T2V", "WAN22_T2V", "WAN21_CausalAR_T2V", "CogVideoX_T2V")
