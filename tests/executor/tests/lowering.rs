//! Every kernel that the library embeds has a meaning here.

use microscale_executor::Module;

/// The committed PTX of a target.
fn ptx(target: &str) -> String {
    let path = format!("{}/../../host/ptx/microscale_{target}.ptx", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

#[test]
fn every_kernel_of_every_target_is_lowered() {
    let mut refused = Vec::new();
    for target in ["sm_80", "sm_90", "sm_100f", "sm_120f"] {
        let module = Module::parse(&ptx(target)).unwrap();
        assert_eq!(module.kernels().count(), microscale_kernels_abi::kernels().len(), "{target}");
        let errors = module.kernels().filter_map(|name| Some((name, module.kernel(name).err()?)));
        refused.extend(errors.map(|(name, error)| format!("{target}, {name}: {error}")));
    }
    assert!(refused.is_empty(), "{}", refused.join("\n"));
}
