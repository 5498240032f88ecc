"""Reasons of the machine and of this pack: (short form, long form), as ``Reason`` has them."""

REASONS = dict(
    # The device and what is installed
    no_such_device=(
        "NVIDIA GPUs only",
        "{kind} are not supported yet. AnyShape supports only NVIDIA GPUs and CPUs, so everything runs in eager, as "
        "without it",
    ),
    no_kernels_on_cpu=(
        "NVIDIA GPUs only: this model is on the CPU",
        "kernels need an NVIDIA GPU and this model is on the CPU, so it runs in eager",
    ),
    old_card=(
        "this card is too old for Triton",
        "this card has compute capability {has}, and Triton needs {needs}: there are no kernels, so the model runs "
        "in eager",
    ),
    no_triton=("Install Triton", "Triton cannot be imported ({error}): {advice}"),
    old_triton=("Update Triton {version}", "Triton {version} is too old: {advice}"),
    old_comfyui=(
        "Update AnyShape: it does not fit this ComfyUI",
        "AnyShape's {part} does not fit this version of ComfyUI ({error}): update AnyShape, or report it",
    ),
    # Memory and graphs
    low_vram=(
        "Use smaller weights (fp8, int8): a part is not on the GPU",
        "low VRAM: {away} of {all} GB of weights are in main memory, and ComfyUI copies them to the GPU at every "
        "step. Blocks whose weights are on the GPU are fast if they are at least a quarter of all, the others run as "
        "without this node, and there is no CUDA graph. Load smaller weights (fp8, int8, 4 bit), lower the image size "
        "or the batch, close other programs that use the GPU, or start ComfyUI without --lowvram and --novram",
    ),
    weights_elsewhere=(
        "Free VRAM: a part of the model is not on the GPU",
        "its weights are in main memory (low VRAM) or on another GPU, so it runs as without this node",
    ),
    casts_itself=(
        "Run it again: a LoRA was put on the weights",
        "layers of another pack ({name}) put a LoRA on their weights themselves, in the first forward after a load. "
        "That one is ComfyUI's own; the next ones are faster",
    ),
    patches_fetched=(
        "no CUDA graph: a LoRA is copied to the GPU at each step",
        "layers of another pack (GGUF, say) put a LoRA of {need} MB on their weights at each step and copy it from "
        "main memory for that, so there is no CUDA graph. Everything else is fused. In mode auto it stays on the GPU "
        "where it takes at most half of graph_budget_mb and that much memory is free, with 1 GB beside it: raise "
        "graph_budget_mb, lower the image size or the batch, or close other programs that use the GPU",
    ),
    weights_streamed=(
        "Use smaller weights (fp8, int8): these do not fit",
        "weights streamed: of {all} GB about {there} GB fit into the GPU's memory beside everything else. ComfyUI "
        "copies the rest there at every step (DynamicVRAM), so the model runs in eager until all of it fits. Load "
        "smaller weights (fp8, int8, 4 bit), lower the image size or the batch, or close other programs that use the "
        "GPU",
    ),
    weights_fetched=(
        "Use smaller weights (fp8, int8): these do not fit",
        "weights streamed: of {all} GB about {there} GB fit into the GPU's memory beside everything else. ComfyUI "
        "copies the rest there at every step (DynamicVRAM). The operations are fused, but there is no CUDA graph, and "
        "where the copies take longer than the GPU's work they decide how fast it is. Load smaller weights (fp8, "
        "int8, 4 bit), lower the image size or the batch, or close other programs that use the GPU",
    ),
    graphs_in_the_way=(
        "Lower graph_budget_mb: the weights need the memory",
        "the model's weights did not fit beside {held} MB of graphs, so the graphs were dropped. The model runs "
        "without a graph until there is room for both. Lower graph_budget_mb, the image size or the batch, or load "
        "smaller weights (fp8, int8, 4 bit)",
    ),
    graphs_no_room=(
        "Use smaller weights (fp8, int8): no room for a graph",
        "the model's weights leave no memory for a graph at this size, so it runs without one. Load smaller weights "
        "(fp8, int8, 4 bit), lower the image size or the batch, or close other programs that use the GPU",
    ),
    no_memory=(
        "Make the image or the batch smaller: out of memory",
        "out of memory for a second run at this size; lower the image size or the batch",
    ),
    no_memory_left=(
        "Make the image or the batch smaller: out of memory",
        "out of memory, so the model's CUDA graphs were dropped; lower the image size or the batch",
    ),
    no_graphs=(
        "Raise graph_budget_mb: it is 0",
        "graph_budget_mb is 0, so no graphs are captured; raise it for more speed at small sizes",
    ),
    large_budget=(
        "Lower graph_budget_mb: the card has {card} MB",
        "graph_budget_mb is {budget}, more than the {card} MB of this card. Graphs are captured until memory runs "
        "out; later sizes run without one. 2048 is enough for most workflows",
    ),
    budget_full=(
        "Raise graph_budget_mb: it is full",
        "graph_budget_mb ({budget}) is full. Raise it in Compile Model to keep this size too. Otherwise this size is "
        "captured at its first prompt, and the least recently used size loses its graph",
    ),
    budget_small=(
        "Raise graph_budget_mb to {wanted}",
        "the graph of this size needs {need} MB and graph_budget_mb is {budget}, so it runs without a graph. Raise "
        "graph_budget_mb to {wanted} for more speed at this size",
    ),
    capture_no_memory=(
        "Lower graph_budget_mb or the image size: memory is short",
        "no graph could be captured at this size ({error}), so it runs without one. Memory is short: lower "
        "graph_budget_mb or the image size, or close other programs that use the GPU",
    ),
    capture_failed=(
        "runs without a CUDA graph: capturing one failed",
        "no graph could be captured at this size ({error}), so it runs without one",
    ),
    capture_nested=(
        "runs without a CUDA graph: another model calls it",
        "another node's patch runs this model within another model's forward, so it has no CUDA graph there",
    ),
    capture_broken=(
        "Restart ComfyUI: CUDA graphs failed",
        "capturing a CUDA graph failed ({error}). With cudaMallocAsync no other capture can begin after that, so "
        "there are no new graphs until ComfyUI is restarted. If memory is short, lower graph_budget_mb or the image "
        "size",
    ),
    warm_up_no_memory=(
        "List fewer or smaller sizes: memory ran short",
        "memory ran short at a later size, and this size lost its graph: list fewer or smaller sizes",
    ),
    # Something went wrong
    failed=(
        "Please report it: {what} failed",
        "{what} of AnyShape failed, so ComfyUI's own code ran instead ({error}). Please report it",
    ),
    kernel_failed=("Please report it: a part runs slower here", "{name} cannot run here ({error})"),
    tape_failed=("Please report it: {error}", "the tape failed: {error}"),
    fails_anyway=(
        "ComfyUI's own fails too: {error}",
        "ComfyUI's own forward fails as well: {error}",
    ),
    block_failed=("Please report it: {error}", "a block's program failed: {error}"),
    wrong=(
        "Update driver, torch and Triton: a result was wrong",
        "{what} gave a wrong result ({how}) and is no longer used. Update torch, Triton and the GPU's driver, and "
        "please report it with their versions",
    ),
    wrong_unfused=(
        "Please report it: a result was wrong",
        "{what} differs from ComfyUI's own forward, even unfused; please report it",
    ),
    wrong_copies=(
        "Run it again: its blocks are not alike",
        "{what} is wrong, because blocks were taken for alike that are not: its next call is recorded as a whole",
    ),
    black=(
        "Load the model in bf16 or fp32: the image would be black",
        "{what} gave values that are not finite (a black image) and is no longer used. If the image is black without "
        "AnyShape too, load the model in bf16 or fp32",
    ),
)
