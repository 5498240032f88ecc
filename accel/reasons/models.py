"""Reasons of a model, of a call and of other nodes: (short form, long form), as ``Reason`` has them."""

REASONS = dict(
    # Other nodes
    passed_by=(
        "Remove the other compile node",
        "another node runs this model past Compile Model (TorchCompileModel compiles it as a whole, say), so "
        "nothing of it was sped up here: remove one of the two nodes",
    ),
    patch_no_graph=(
        "another node's patch: no CUDA graph ({patch})",
        "in each forward another node's patch is called {calls} times ({patch}), so there is no graph",
    ),
    patch_again=(
        "another node's patch is called from now on",
        "a patch of another node changed in this forward: it is called in each forward from now on",
    ),
    patch_form=(
        "another node's patch changes sizes ({patch})",
        "a patch of another node gives results of several forms ({patch}), so the forward is not recorded as a whole",
    ),
    patched_block=(
        "another node patches some blocks ({patch})",
        "a patch of another node is called in a block ({patch}): that block runs in eager",
    ),
    patch_argument=(
        "another node's patch replaces a block ({patch})",
        "a patch of another node is called in each forward and takes a {kind} ({patch}), so the forward is not "
        "recorded as a whole",
    ),
    patch_writes_options=(
        "another node's patch changes options ({patch})",
        "a patch of another node writes into the options of the forward ({patch})",
    ),
    patch_writes_input=(
        "another node's patch changes an input ({patch})",
        "a patch of another node writes into an input or a part of a tensor ({patch})",
    ),
    foreign_state=(
        "another node's code keeps something ({name})",
        "another node hooked or replaced a part of the model, and its code may keep something from one call to the "
        "next ({name}), so the forward is not recorded as a whole",
    ),
    torch_replaced=(
        "another node replaced torch's {name}",
        "another node put its own function in the place of torch's {name}: ComfyUI's own forward runs",
    ),
    foreign_block=(
        "another node changed a block",
        "another node replaced or hooked a block, or its weights change at each call: it runs in eager",
    ),
    attention_no_graph=(
        "another node's attention: no CUDA graph",
        "another node's attention is called in each forward, so there is no graph",
    ),
    attention_option=(
        "another node's attention reads the option {option}",
        "another node's attention reads the option {option}",
    ),
    autocast=(
        "Remove the node that switches autocast on",
        "torch.autocast is on (another node switched it on), and fused operations do not follow it: it runs in eager",
    ),
    option_differs=(
        "another node changes an option at each step ({option})",
        "the option {option} differs in each call, so no recording fits twice",
    ),
    # What the call or the model is
    training=("training is on", "gradients are on (training), so the {what} runs in eager"),
    strange_argument=(
        "called with {name}, which is not supported",
        "the model was called with {name}, which AnyShape does not know",
    ),
    no_tensor=("called without a tensor", "the model was called without a tensor"),
    dtype=(
        "Load the model in fp16, bf16 or fp32",
        "{dtype} activations are not supported; load the model in fp16, bf16 or fp32",
    ),
    other_device=("Free VRAM: {name} is not on the GPU", "{name} lies on another device than the latent"),
    no_vae=("no VAE in this file", "no VAE was found in this file, so there is nothing to speed up"),
    vae_in_pieces=(
        "this VAE saves memory by working in pieces",
        "the pictures of this VAE lie in main memory and go to the GPU piece by piece, which is ComfyUI's own way to "
        "save memory: it runs in eager",
    ),
    no_pictures=(
        "this VAE makes neither images nor video",
        "this VAE makes neither images nor video, so a size in pixels says nothing of it",
    ),
    t2i_adapter=(
        "nothing to gain: it runs once per picture",
        "a T2I-Adapter runs only once per sampling run, not at each step, so there is nothing to speed up",
    ),
    unknown_control=("not supported: {name}", "{name} is not a kind of ControlNet that AnyShape knows"),
    not_finite=(
        "Load the model in bf16 or fp32: ComfyUI's fails too",
        "ComfyUI's own result is not finite at this size, so nothing could be compared with it. If the picture is "
        "black, load the model in bf16 or fp32",
    ),
    # The forward cannot be repeated
    draws=("the model draws random numbers", "it draws random numbers"),
    unwritten=(
        "the model uses code that cannot be repeated",
        "an operation went past torch's dispatcher: memory was read that nothing recorded has written",
    ),
    streams=("the model works on several CUDA streams", "it works on several CUDA streams"),
    size_of_values=("the model decides by values", "the size of a result depends on values"),
    value_came_back=("the model reads a value back from the GPU", "a value came back from the GPU to the host"),
    tensor_came_back=("the model reads a tensor back from the GPU", "a tensor came back from the GPU to the host"),
    read_back=("the model reads a value back", "a value came back to the host"),
    writes_several=("the model uses {name}, which is not supported", "{name} writes into several tensors"),
    moves=("the model uses {name}, which is not supported", "{name} changes where a tensor lies"),
    writes_input=("the model changes its input or a weight", "it writes into an input or a weight"),
    writes_kept=("the model changes a tensor that it keeps", "it writes into a tensor that it keeps"),
    keeps=("the model keeps a tensor for its next call", "the model keeps a tensor for its next call ({tensor})"),
    no_origin=(
        "the model reads a tensor of its own",
        "it reads a tensor {shape} that is no input, no weight and not made of sizes (a cache of the model's own, "
        "or another node's)",
    ),
    twice=("an option is a tensor of the model's too", "an option is a tensor that the model has by another way too"),
    no_result=("its result is no tensor", "its result is no tensor"),
    odd_result=("its result is no tensor", "its result is neither a tensor nor a list of tensors"),
    constant=("its result does not depend on its input", "its result does not depend on what it is given"),
    changes_itself=("the model changes while it runs", "the model is changed while it runs, {change}"),
    recording_failed=("Please report it: recording failed", "recording failed, {error}; please report it"),
    # Blocks recorded one by one
    block_passing=(
        "some blocks run as ComfyUI's",
        "what a block reads of its options is no longer there after its call: it runs in eager",
    ),
    block_options=(
        "some blocks run as ComfyUI's: their options differ",
        "blocks read options that differ from block to block: those run in eager",
    ),
    block_changes_options=("some blocks run as ComfyUI's", "a block changes the options that it is given"),
    block_changes_list=("some blocks run as ComfyUI's", "a block changes a list or dict that it is given"),
    block_argument=(
        "some blocks run as ComfyUI's",
        "a block was called with a {kind}, which AnyShape does not know: it runs in eager",
    ),
    block_same_tensor=(
        "some blocks run as ComfyUI's",
        "a block takes the same tensor as an argument and from its options",
    ),
    block_shared=(
        "some blocks run as ComfyUI's",
        "a block writes into an input that shares its memory with another one",
    ),
    block_result=("some blocks run as ComfyUI's", "a block's result is not made of tensors of its own"),
    blocks=(
        "its blocks run fast, one by one",
        "blocks recorded one by one, not the whole forward: {why}",
    ),
    blocks_no_gain=("its blocks are no faster than ComfyUI's", "nothing in its blocks fuses"),
    gpu_limit=(
        "no CUDA graph needed: the GPU is busy all the time",
        "the GPU is the limit at this size ({elapsed} ms, launching {host} ms): no graph",
    ),
    # Skip Blocks and Warm Up
    no_blocks=(
        "Remove Skip Blocks: it does not fit this model",
        "{why}: no blocks are skipped, it runs as without this node",
    ),
    no_such_depth=(
        "Lower depth: 0 to {deepest} here",
        "depth is {depth}, and this model has 0 to {deepest}: auto is used",
    ),
    own_steps=(
        "Use euler or dpmpp_2m: this sampler chooses its own steps",
        "this sampler chooses its own steps, so every step is full; use euler, dpmpp_2m or another one",
    ),
    silent_sampler=(
        "Use euler or dpmpp_2m: this sampler hides its steps",
        "this sampler does not report its steps, so every step is full; use euler, dpmpp_2m or another one",
    ),
    unrecorded=(
        "no block is skipped: the model cannot be recorded",
        "this model's forward could not be recorded (Shape Cache Info says why), so none of its blocks is skipped",
    ),
    no_middle=("Remove Skip Blocks: it does not fit this model", "no block of this model is skipped: {why}"),
    skipped_gone=(
        "this step ran in full",
        "there is no program of skipped steps for this size and batch, so this step runs in full, which makes it",
    ),
    skip_failed=(
        "a step could not be skipped",
        "a skipped step had no program for its size and batch yet, or it failed: it ran in full instead",
    ),
    called_twice=(
        "a prompt is evaluated twice per step",
        "a prompt is evaluated twice per step on the same patches and size (context windows, say): which feature "
        "belongs to which call cannot be known, so that prompt is never skipped",
    ),
    uneven=(
        "a batch could not be split by prompt",
        "the rows of a call could not be told apart by prompt, so it ran in full",
    ),
    newcomer=(
        "a prompt, a patch or a size is new",
        "a prompt, a patch or a latent size was not there at the last full step",
    ),
    nothing_compiled=(
        "Connect Compile Model before Warm Up",
        "connect Compile Model before Warm Up: nothing to warm up. This MODEL does not run compiled (no Compile "
        "Model node, its mode is off, or it could not be compiled), and passes through as it is",
    ),
    vae_not_compiled=(
        "Connect Compile VAE before Warm Up",
        "this VAE does not come from Compile VAE: nothing of it was warmed up, and it passes through as it is",
    ),
    not_timed=(
        "ComfyUI's own time is not known",
        "ComfyUI's own forward at {shape} could not be timed ({error})",
    ),
    gave_way=("another prompt waits", "another prompt waits, so this size is left for a quiet moment"),
    no_last_sizes=(
        "List the sizes: none of an earlier session are known",
        "no sizes of an earlier session are known for this model: they are kept when it runs, by the name of its file. "
        "List them, or choose another preset",
    ),
    taken_over=(
        "Bypass node {id}: it compiles the model itself",
        "node {id} ({name}) compiles the model itself, so it was left alone: bypass that node to have AnyShape "
        "accelerate this model",
    ),
    # What rounds otherwise than ComfyUI's own forward
    gelu_rounds_less=(
        "GELU rounds once less",
        "GELU behind a linear layer is computed on the layer's float32 sums: one rounding to 16 bits less than in "
        "eager",
    ),
    other_attention=(
        "attention sums in another order",
        "Attention runs on the one of PyTorch's exact backends that was measured fastest on this card, which is not "
        "the one that ComfyUI asks for: its sums are in another order, and as exact",
    ),
    amplifies=(
        "it amplifies rounding",
        "The model amplifies rounding: a latent that is off by one step of its dtype changes its result by {share} in "
        "ComfyUI too. So pictures may differ from ComfyUI's in details",
    ),
)
