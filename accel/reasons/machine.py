"""Reasons of the machine and of this pack: (short form, long form), as ``Reason`` has them."""

REASONS = dict(
    # The device and what is installed
    no_such_device=(
        "NVIDIA GPUs only",
        "{kind} are not supported yet, only NVIDIA GPUs and CPUs: everything runs in eager, as without AnyShape",
    ),
    no_kernels_on_cpu=(
        "NVIDIA GPUs only: this model is on the CPU",
        "kernels need an NVIDIA GPU and this model is on the CPU, so it runs in eager",
    ),
    old_card=(
        "this card is too old for Triton",
        "this card has compute capability {has}, and Triton needs {needs}: no kernels, so the model runs in eager",
    ),
    no_triton=("Install Triton", "Triton cannot be imported ({error}): {advice}"),
    old_triton=("Update Triton {version}", "Triton {version} is too old: {advice}"),
    old_comfyui=(
        "Update AnyShape: it does not fit this ComfyUI",
        "this version of ComfyUI is not one that AnyShape's {part} fits ({error}): update AnyShape, or report it",
    ),
    # Memory and graphs
    low_vram=(
        "Use smaller weights (fp8, int8): a part is not on the GPU",
        "low VRAM: {away} of {all} GB of weights lie in main memory, and ComfyUI copies them to the GPU in each step. "
        "Blocks whose weights are on the GPU are fast, the others run as without this node, and there is no graph. "
        "Load smaller weights (fp8, int8, 4 bit), lower the image size or the batch, close other programs that use "
        "the GPU, or start ComfyUI without --lowvram and --novram",
    ),
    weights_elsewhere=(
        "Free VRAM: a part of the model is not on the GPU",
        "its weights lie in main memory (low VRAM) or on another GPU, so it runs as without this node",
    ),
    weights_streamed=(
        "Use smaller weights (fp8, int8): these do not fit",
        "weights streamed: of {all} GB about {there} GB fit into the GPU's memory beside everything else, and ComfyUI "
        "copies the others there in each step (DynamicVRAM), so the model runs in eager until all of them fit. Load "
        "smaller weights (fp8, int8, 4 bit), lower the image size or the batch, or close other programs that use "
        "the GPU",
    ),
    graphs_in_the_way=(
        "Lower graph_budget_mb: the weights need the memory",
        "the model's weights did not fit beside {held} MB of graphs, so the graphs were dropped, and it runs without "
        "one until there is room for both. Lower graph_budget_mb, the image size or the batch, or load smaller "
        "weights (fp8, int8, 4 bit)",
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
        "out of memory, so its graphs were dropped; lower the image size or the batch",
    ),
    no_graphs=(
        "Raise graph_budget_mb: it is 0",
        "graph_budget_mb is 0, so no graphs are captured; raise it for more speed at small sizes",
    ),
    large_budget=(
        "Lower graph_budget_mb: the card has {card} MB",
        "graph_budget_mb is {budget}, more than the {card} MB of this card: graphs are captured until memory runs "
        "out, then sizes run without one. 2048 is enough for most workflows",
    ),
    budget_full=(
        "Raise graph_budget_mb: it is full",
        "graph_budget_mb ({budget}) is full: raise it in Compile Model to keep this size too. Without that it is "
        "captured at its first prompt, and the least recently used size gives way",
    ),
    budget_small=(
        "Raise graph_budget_mb to {wanted}",
        "this size needs {need} MB for its graph, graph_budget_mb is {budget}: it runs without a graph. Raise "
        "graph_budget_mb to {wanted} for more speed at this size",
    ),
    capture_no_memory=(
        "Lower graph_budget_mb or the image size: memory is short",
        "no graph could be captured for this size ({error}): it runs without one. Memory is short: lower "
        "graph_budget_mb or the image size, or close other programs that use the GPU",
    ),
    capture_failed=(
        "runs without a CUDA graph: capturing one failed",
        "no graph could be captured for this size ({error}): it runs without one",
    ),
    capture_broken=(
        "Restart ComfyUI: CUDA graphs failed",
        "a capture failed ({error}), and under cudaMallocAsync none can begin after that: no new graphs until "
        "ComfyUI is restarted. If memory is short, lower graph_budget_mb or the image size",
    ),
    warm_up_no_memory=(
        "List fewer or smaller sizes: memory ran short",
        "memory ran short at a later size, which took this graph's: list fewer or smaller sizes",
    ),
    # Something went wrong
    failed=(
        "Please report it: {what} failed",
        "{what} of AnyShape failed, so ComfyUI's own took its place ({error}). Please report it",
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
        "{what} gave a wrong result ({how}) and is not used any more. Update torch, Triton and the GPU's driver, "
        "and please report it with their versions",
    ),
    wrong_unfused=(
        "Please report it: a result was wrong",
        "{what} is not what ComfyUI's own forward gives, even unfused; please report it",
    ),
    wrong_copies=(
        "Run it again: its blocks are not alike",
        "{what}, with blocks taken for alike, is wrong: its next call is recorded as a whole",
    ),
    black=(
        "Load the model in bf16 or fp32: the image would be black",
        "{what} gave values that are not finite (a black image) and is not used any more. If eager gives a black "
        "image too, load the model in bf16 or fp32",
    ),
)
