//! Compares the tensors of PyTorch files with the bytes that torch reads.

use microscale_checkpoint::{Checkpoint, Tensor};
use microscale_test_support::golden::folder;

fn open(name: &str) -> Checkpoint {
    Checkpoint::open(&folder("pytorch").join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[test]
fn tensors_match_torch() {
    for name in ["model", "protocol-4", "training"] {
        let (pickled, expected) = (open(&format!("{name}.pt")), open(&format!("{name}.safetensors")));
        let count = |checkpoint: &Checkpoint| checkpoint.tensors().count();
        assert!(count(&pickled) == count(&expected) && count(&expected) > 0, "{name}");
        for Tensor { name: tensor, dtype, shape, data, .. } in expected.tensors() {
            let found = pickled.tensor(tensor).unwrap_or_else(|| panic!("{name}: {tensor} is missing"));
            assert_eq!((found.dtype, found.shape), (dtype, shape), "{name}: {tensor}");
            assert!(found.data == data, "{name}: {tensor} has other bytes");
        }
    }
}

#[test]
fn pickled_programs_and_old_files_are_refused_by_name() {
    for (name, why) in [
        ("module.pt", "its pickle uses \"torch.nn.modules.linear.Linear\""),
        ("legacy.pt", "a PyTorch file as before version 1.6"),
    ] {
        let refused = Checkpoint::open(&folder("pytorch").join(name)).unwrap_err().to_string();
        assert!(refused.contains(name) && refused.contains(why), "{refused}");
    }
}
