# ruff: noqa: E501 - a sentence a line, so that the two languages can be laid side by side
"""The words around the figures in README.md and README.zh-CN.md. Names in braces are filled in by ``bench.tables``."""

ENGLISH = {
    "conditions": "One {gpu}, torch {torch}, Triton {triton}, ComfyUI {comfyui}, torch's {allocator} allocator, ComfyUI's default attention. Milliseconds, eager → AnyShape.",
    "legend": "*UNet*: one model call of SDXL in fp16 within a sampling run through `comfy.sample`. "
    "*Rows*: the batch that the UNet sees, 2 per image with CFG, 1 without (CFG 1.0). "
    "*First call*: seconds that the first run of a size took beyond eager; the first line pays for the start of the process too. "
    "*Break-even*: how many 20-step images it takes to recover the start-up cost, with an empty / a filled Triton cache. "
    "*VAE decode*: SDXL's VAE in bf16.",
    "head": ("Size", "Images", "Rows", "UNet", "First call", "Break-even", "VAE decode"),
    "starts": "The first run of a process takes {cold} s beyond eager with an empty Triton cache and {warm} s with a filled one (fresh processes, {size}); the process of the table began with empty caches.",
    "memory": "The graphs of all {count} shapes of the UNet take {memory} MiB.",
    "vae": "The first VAE decode of a process took {first} s; encoding {size} {encode} ms. Error of a bf16 decode against float32: {error}, eager's own {eager_error}.",
    "restart": "The first picture of a new process ({size}, {steps} steps, with the VAE) takes eager {eager} s; AnyShape {cold} s with everything empty, {store} s with the store of compiled kernels alone, {caches} s with filled compiler caches.",
    "plot": "Seconds of the first prompt, and of all prompts together, one line a method",
    "mixed": "The mixed run: {count} prompts of other sizes and batches, {steps} Euler steps each, everything included: {runs}.",
    "names": {
        "eager": "eager",
        "anyshape": "AnyShape",
        "unverified": "AnyShape with verify off",
        "blocks": "each transformer block compiled with torch's defaults",
        "core": "ComfyUI's TorchCompileModel",
    },
    "once": "{name} {cold}",
    "alike": "{name} {cold}, with empty compiler caches or filled ones",
    "twice": "{name} {cold} with empty compiler caches, {warm} with filled ones",
    "finished": "{seconds} s",
    "stopped": "not finished after {limit} s ({done} of {count} prompts done)",
    "failed": "failed after {done} of {count} prompts",
    "skip": "Skip Blocks, interval {interval}, one image of {steps} Euler steps with CFG, seconds: {runs}. How near the pictures come is in [docs/performance.md](docs/performance.md).",
    "skip_of": "{name} at {size} {eager} in eager, {compiled} on Compile Model",
    "between": "; ",
    "sentences": " ",
}
CHINESE = {
    "conditions": "一张 {gpu}，torch {torch}，Triton {triton}，ComfyUI {comfyui}，torch 的 {allocator} 显存分配器，默认的注意力实现。单位毫秒，eager → AnyShape。",
    "legend": "*UNet*：SDXL、fp16，通过 `comfy.sample` 采样时的一次模型调用。"
    "*行数*：UNet 看到的批量，开启 CFG 时每张图 2 行，不用 CFG（即 1.0）时 1 行。"
    "*首次调用*：某个尺寸第一次运行比 eager 多花的秒数；第一行还含进程的启动开销。"
    "*回本*：多少张 20 步的图像之后，省下的时间抵过启动的开销（Triton 缓存为空 / 已有）。"
    "*VAE 解码*：SDXL 的 VAE，bf16。",
    "head": ("尺寸", "图像数", "行数", "UNet", "首次调用", "回本", "VAE 解码"),
    "starts": "进程的第一次运行，Triton 缓存为空时比 eager 多 {cold} 秒，缓存已有时多 {warm} 秒（新进程，{size}）；表格所用的进程从空缓存开始。",
    "memory": "UNet 全部 {count} 种形状的 CUDA 图共占 {memory} MiB。",
    "vae": "进程中首次 VAE 解码用时 {first} 秒；编码 {size} 为 {encode} 毫秒。bf16 解码相对 float32 的误差：{error}，eager 自己是 {eager_error}。",
    "restart": "新进程的第一张图（{size}，{steps} 步，含 VAE）：eager {eager} 秒；AnyShape 在一切为空时 {cold} 秒，只有内核存储时 {store} 秒，编译缓存已有时 {caches} 秒。",
    "plot": "第一个提示词和全部提示词所用的秒数，每种方法一条线",
    "mixed": "混合测试：{count} 个提示词，尺寸和批量各不相同，各 {steps} 步 Euler，含一切开销：{runs}。",
    "names": {
        "eager": "eager",
        "anyshape": "AnyShape",
        "unverified": "AnyShape（关闭 verify）",
        "blocks": "逐个编译 transformer 块（torch 默认设置）",
        "core": "ComfyUI 的 TorchCompileModel",
    },
    "once": "{name} {cold}",
    "alike": "{name} 无论编译缓存是否为空，{cold}",
    "twice": "{name} 在编译缓存为空时 {cold}，缓存已有时 {warm}",
    "finished": "{seconds} 秒",
    "stopped": "{limit} 秒后仍未完成（{count} 个提示词完成了 {done} 个）",
    "failed": "完成 {done} 个提示词（共 {count} 个）后失败",
    "skip": "跳过模块，间隔 {interval}，一张图 {steps} 步 Euler、开启 CFG，秒：{runs}。图像的接近程度见 [docs/performance.md](docs/performance.md)。",
    "skip_of": "{name} {size}，eager {eager}，加上编译模型 {compiled}",
    "between": "；",
    "sentences": "",
}
