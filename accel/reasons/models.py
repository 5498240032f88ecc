"""Reasons of a model, of a call and of other nodes: (short form, long form), as ``Reason`` has them."""

REASONS = dict(
    # Other nodes
    passed_by=(
        "Another node or the sampler runs the model by itself",
        "this run bypasses Compile Model, so nothing was sped up here. Another node or the sampler calls the model "
        "by itself. A node that compiles the model as a whole does so (TorchCompileModel): use one of the two. A node "
        "that calls the model with other options does so, too (Excellent and Custom attention of AutomaticCFG): "
        "without it the run is faster. And a video that is made block by block (SamplerARVideo) needs ComfyUI's own "
        "forward",
    ),
    control_passed_by=(
        "Put Compile ControlNet after the other node",
        "this run bypasses Compile ControlNet: another node compiles its network as a whole (TorchCompileControlNet), "
        "or has put another in its place. Put Compile ControlNet after that node, or use one of the two",
    ),
    patch_called=(
        "another node's patch is called ({patch})",
        "in each forward another node's patch is called {calls} times ({patch}); what is between the calls is fast",
    ),
    patches_slower=(
        "another node's patch needs a CUDA graph",
        "{why}. Another node's patch is called in each forward, and without a CUDA graph ComfyUI's own forward is "
        "faster at this size, so it runs",
    ),
    patch_again=(
        "another node's patch is called from now on",
        "another node's patch changed during this forward, so it is called in each forward from now on",
    ),
    patch_form=(
        "another node's patch differs from step to step ({patch})",
        "another node's patch returns results of several shapes or types, or begins in mid-run to write or to keep "
        "something ({patch}), so the forward is not recorded as a whole",
    ),
    patched_block=(
        "another node patches some blocks ({patch})",
        "another node's patch is called in a block ({patch}), so that block runs in eager",
    ),
    patch_argument=(
        "another node's patch replaces a block ({patch})",
        "another node's patch is called in each forward and takes a {kind} ({patch}), so the forward is not recorded "
        "as a whole",
    ),
    patch_writes_options=(
        "another node's patch changes options ({patch})",
        "another node's patch writes into the options of the forward ({patch})",
    ),
    patch_writes_input=(
        "another node's patch changes an input ({patch})",
        "another node's patch writes into an input or into a part of a tensor ({patch})",
    ),
    foreign_state=(
        "another node's code keeps state ({name})",
        "another node hooked or replaced a part of the model. Its code may keep state from one call to the next "
        "({name}), so the forward is not recorded as a whole",
    ),
    torch_replaced=(
        "another node replaced torch's {name}",
        "another node replaced torch's {name} with a function of its own, so ComfyUI's own forward runs",
    ),
    foreign_block=(
        "another node changed a block",
        "another node replaced or hooked a block, or the weights of the block change at each call, so it runs in eager",
    ),
    attention_called=(
        "another node's attention is called",
        "another node's attention is called in each forward; what is between the calls is fast",
    ),
    attention_option=(
        "another node's attention reads the option {option}",
        "another node's attention reads the option {option}",
    ),
    autocast=(
        "Remove the node that switches autocast on",
        "another node switched torch.autocast on. Fused operations do not follow it, so the model runs in eager",
    ),
    option_differs=(
        "another node changes an option at each step ({option})",
        "the option {option} is different in each call, so no recording can be used twice",
    ),
    one_step=(
        "one step: fast from the second picture of this size on",
        "a run of one step: preparing a size takes longer than one step saves. It is prepared when this size comes "
        "again; Warm Up prepares sizes beforehand",
    ),
    option_written=(
        "the model keeps something in an option ({option})",
        "the model keeps something for its next call in the option {option}, so the forward is not recorded as a whole",
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
        "{dtype} activations are not supported. Load the model in fp16, bf16 or fp32",
    ),
    other_device=("Free VRAM: {name} is not on the GPU", "{name} is on another device than the latent"),
    no_vae=("no VAE in this file", "no VAE was found in this file, so there is nothing to speed up"),
    vae_in_pieces=(
        "this VAE saves memory by working in pieces",
        "this VAE keeps its pictures in main memory and sends them to the GPU piece by piece. That is how ComfyUI "
        "saves memory, so the VAE runs in eager",
    ),
    no_pictures=(
        "this VAE makes neither images nor video",
        "this VAE makes neither images nor video, so a size in pixels does not apply to it",
    ),
    t2i_adapter=(
        "nothing to gain: it runs once per picture",
        "a T2I-Adapter runs only once per sampling run, not at every step, so there is nothing to speed up",
    ),
    unknown_control=("not supported: {name}", "{name} is not a kind of ControlNet that AnyShape supports"),
    not_finite=(
        "Load the model in bf16 or fp32: ComfyUI's fails too",
        "ComfyUI's own result is not finite at this size, so there is nothing to compare with. If the picture is "
        "black, load the model in bf16 or fp32",
    ),
    # The forward cannot be repeated
    draws=("the model draws random numbers", "it draws random numbers"),
    unwritten=(
        "the model uses code that cannot be repeated",
        "an operation bypassed torch's dispatcher: it read memory that no recorded operation has written",
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
        "it reads a tensor {shape} that is not an input, not a weight and not computed from sizes (a cache of the "
        "model's own, or of another node)",
    ),
    twice=("an option is a tensor of the model's too", "an option is a tensor that the model also has in another way"),
    no_result=("its result is not a tensor", "its result is not a tensor"),
    odd_result=("its result is not a tensor", "its result is neither a tensor nor a list of tensors"),
    constant=("its result does not depend on its input", "its result does not depend on what it is given"),
    changes_itself=("the model changes while it runs", "the model is changed while it runs, {change}"),
    recording_failed=("Please report it: recording failed", "recording failed, {error}; please report it"),
    # Blocks recorded one by one
    block_passing=(
        "some blocks run as ComfyUI's",
        "an option that a block reads is gone after its call, so that block runs in eager",
    ),
    block_options=(
        "some blocks run as ComfyUI's: their options differ",
        "blocks read options that differ from block to block, so those blocks run in eager",
    ),
    block_changes_options=("some blocks run as ComfyUI's", "a block changes the options that it is given"),
    block_changes_list=("some blocks run as ComfyUI's", "a block changes a list or dict that it is given"),
    block_argument=(
        "some blocks run as ComfyUI's",
        "a block was called with a {kind}, which AnyShape does not know, so it runs in eager",
    ),
    block_same_tensor=(
        "some blocks run as ComfyUI's",
        "a block gets the same tensor as an argument and from its options",
    ),
    block_shared=(
        "some blocks run as ComfyUI's",
        "a block writes into an input that shares its memory with another one",
    ),
    block_result=("some blocks run as ComfyUI's", "a block returns something other than tensors of its own"),
    blocks=(
        "its blocks run fast, one by one",
        "blocks recorded one by one, not the whole forward: {why}",
    ),
    blocks_no_gain=("its blocks are no faster than ComfyUI's", "nothing in its blocks can be fused"),
    gpu_limit=(
        "no CUDA graph needed: the GPU is busy all the time",
        "the GPU is the limit at this size ({elapsed} ms; launching takes {host} ms), so a graph would not help",
    ),
    # Skip Blocks and Warm Up
    no_blocks=(
        "Remove Skip Blocks: it does not fit this model",
        "{why}: no blocks are skipped, and it runs as without this node",
    ),
    skip_passed_by=(
        "Another node or the sampler runs the model by itself",
        "this run bypasses Skip Blocks, so no blocks were skipped. Another node or the sampler calls the model by "
        "itself, as a node does that compiles the model as a whole (TorchCompileModel): without it blocks are skipped",
    ),
    no_such_depth=(
        "Lower depth: 0 to {deepest} here",
        "depth is {depth}, but this model has 0 to {deepest}, so auto is used",
    ),
    own_steps=(
        "Use euler or dpmpp_2m: this sampler chooses its own steps",
        "this sampler chooses its own steps, so every step is full. Use euler, dpmpp_2m or another sampler",
    ),
    silent_sampler=(
        "Use euler or dpmpp_2m: this sampler hides its steps",
        "this sampler does not report its steps, so every step is full. Use euler, dpmpp_2m or another sampler",
    ),
    unrecorded=(
        "no block is skipped: the model cannot be recorded",
        "this model's forward could not be recorded (Shape Cache Info says why), so none of its blocks is skipped",
    ),
    no_middle=("Remove Skip Blocks: it does not fit this model", "no block of this model is skipped: {why}"),
    skipped_gone=(
        "this step ran in full",
        "there is no program yet for skipped steps of this size and batch. This step runs in full and makes one",
    ),
    skip_failed=(
        "a step could not be skipped",
        "a step that was to be skipped had no program for its size and batch yet, or the program failed, so the step "
        "ran in full",
    ),
    called_twice=(
        "a prompt is evaluated twice per step",
        "a prompt is evaluated twice per step with the same patches and size (context windows, for example). Which "
        "feature belongs to which call cannot be known, so that prompt is never skipped",
    ),
    uneven=(
        "a batch could not be split by prompt",
        "the rows of a batch could not be assigned to their prompts, so the call ran in full",
    ),
    newcomer=(
        "a prompt, a patch or a size is new",
        "a prompt, a patch or a latent size was not there at the last full step",
    ),
    nothing_compiled=(
        "Connect Compile Model before Warm Up",
        "connect Compile Model before Warm Up: there is nothing to warm up. This MODEL is not compiled (no Compile "
        "Model node, its mode is off, or it could not be compiled) and passes through as it is",
    ),
    vae_not_compiled=(
        "Connect Compile VAE before Warm Up",
        "this VAE does not come from Compile VAE, so it was not warmed up and passes through as it is",
    ),
    not_timed=(
        "ComfyUI's own time is not known",
        "ComfyUI's own forward at {shape} could not be timed ({error})",
    ),
    gave_way=("another prompt is waiting", "another prompt is waiting, so this size is left for a quiet moment"),
    no_last_sizes=(
        "List the sizes: none are known from an earlier session",
        "no sizes of an earlier session are known for this model. They are kept under its file name when it runs. "
        "List the sizes, or choose another preset",
    ),
    taken_over=(
        "Bypass node {id}: it compiles the model itself",
        "node {id} ({name}) compiles the model itself, so AnyShape left it alone. Bypass that node to let AnyShape "
        "accelerate the model",
    ),
    # What rounds otherwise than ComfyUI's own forward
    gelu_rounds_less=(
        "GELU rounds once less",
        "GELU after a linear layer is computed from the layer's float32 sums, with one rounding to 16 bits less than "
        "in eager",
    ),
    other_attention=(
        "attention sums in another order",
        "Attention runs on the exact PyTorch backend that was measured fastest on this card, not on the one that "
        "ComfyUI asks for. It sums in another order and is as exact",
    ),
    amplifies=(
        "it amplifies rounding",
        "The model amplifies rounding: a latent that is off by one step of its dtype changes the result by {share}, "
        "in ComfyUI too. Pictures may therefore differ from ComfyUI's in details",
    ),
)
