//! Hostile PTX for the tests' executor. It is parsed and lowered, but not run.

use microscale_executor::Module;

pub(super) fn run(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let Ok(module) = Module::parse(&text) else { return };
    for name in module.kernels() {
        let Ok(kernel) = module.kernel(name) else { continue };
        let _ = kernel.instructions();
        for index in 0..kernel.len() {
            let _ = kernel.instruction(index);
        }
    }
}
