//! Checks that every embedded kernel can be lowered.

use microscale_executor::Module;
use microscale_kernels_abi::{Ptx, TARGETS};

/// Returns the committed PTX of a target.
fn ptx_of(target: &str) -> String {
    let target = TARGETS.iter().find(|of| of.name == target).expect("a target");
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../host/ptx");
    Ptx::read_all(folder.as_ref(), target).unwrap_or_else(|error| panic!("{error}")).to_string()
}

#[test]
fn every_kernel_of_every_target_is_lowered() {
    let mut refused = Vec::new();
    for target in &TARGETS {
        let module = Module::parse(&ptx_of(target.name)).unwrap();
        let expected = microscale_kernels_abi::kernels_for(target).count();
        assert_eq!(module.kernels().count(), expected, "{}", target.name);
        let errors = module.kernels().filter_map(|name| Some((name, module.kernel(name).err()?)));
        refused.extend(errors.map(|(name, error)| format!("{}, {name}: {error}", target.name)));
    }
    assert!(refused.is_empty(), "{}", refused.join("\n"));
}

/// Checks that a kernel with this body and this module text before it is refused.
#[track_caller]
fn refused(front: &str, body: &str, part: &str) {
    let text =
        format!(".version 8.0 .target sm_90 .address_size 64\n{front}\n.visible .entry k() {{ {body} }}");
    let refused =
        Module::parse(&text).and_then(|module| module.kernel("k").cloned()).unwrap_err().to_string();
    assert!(refused.contains(part), "{refused}");
}

#[test]
fn text_that_would_overflow_the_stack_or_an_offset_is_refused() {
    for bracket in ["{", "("] {
        refused("", &format!("mov.b32 {};", bracket.repeat(1 << 20)), "");
        refused("", &format!("mov.b32 a, {}", bracket.repeat(100)), "");
    }
    let nested = format!("mov.b32 {}a{};", "{".repeat(20), "}".repeat(20));
    refused("", &nested, "too many brackets");
    refused(
        ".shared .align 2147483648 .b8 a[2147483649];",
        ".shared .align 2147483648 .b8 b[1];",
        "shared memory",
    );
    refused(".shared .b8 a[4294967295];", ".extern .shared .align 128 .b8 b[];", "shared memory");
    refused("", ".reg .b32 %r<4294967295>;", "too many registers");
}
