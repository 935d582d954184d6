//! Indexes that list fewer tensors than the shards hold, or other shards than loaders read.

use std::path::{Path, PathBuf};

use microscale::{Device, Dtype, Format};
use microscale_checkpoint::{
    Checkpoint, CheckpointFormat, Convert, Dequantize, DirectoryError, Error, Part, Quantize, compare,
    diagnose, logical, merge,
};
use microscale_test_support::Scratch;

use crate::input::{Tensor, write_file};
use crate::{files, going_on, quantize, request, tensors};

const DOWN: &str = "model.layers.0.mlp.down_proj.weight";
const UP: &str = "model.layers.0.mlp.up_proj.weight";
const GATE: &str = "model.layers.0.mlp.gate_proj.weight";
const OUT: &str = "model.layers.0.self_attn.o_proj.weight";

fn weight(name: &str, seed: u64) -> Tensor {
    Tensor::noise::<f32>(name, &[32, 64], seed)
}

/// A model of three weights in two shards. The shard `overlay` has `OUT`, another `UP`, and `GATE`,
/// which the index does not list. The index maps `UP` to `mapped`.
fn overlaid(scratch: &Scratch, overlay: &str, mapped: &str) -> PathBuf {
    write_file(scratch, "IN/model-1.safetensors", &[weight(DOWN, 1), weight(UP, 2)]);
    write_file(scratch, format!("IN/{overlay}"), &[weight(UP, 3), weight(GATE, 4), weight(OUT, 6)]);
    write_file(scratch, "IN/unmapped.safetensors", &[weight(DOWN, 5)]);
    scratch.write_index("IN", &[(DOWN, "./model-1.safetensors"), (OUT, overlay), (UP, mapped)]);
    scratch.write("IN/config.json", "{}");
    scratch.path("IN")
}

/// The index of an output, with its directory's tensors: each is in one file, the one that it names.
#[track_caller]
fn has_right_index(directory: &Path) {
    let index: serde_json::Value =
        serde_json::from_slice(&files(directory)[Path::new("model.safetensors.index.json")]).unwrap();
    let map = index["weight_map"].as_object().unwrap();
    let mut bytes = 0;
    let mut names = Vec::new();
    for (file, _) in files(directory) {
        if file.to_string_lossy().ends_with(".safetensors") && file != Path::new("unmapped.safetensors") {
            for (name, (_, _, data)) in tensors(&directory.join(&file)) {
                assert_eq!(map[&name], file.to_string_lossy().as_ref(), "{name}");
                bytes += data.len();
                names.push(name);
            }
        }
    }
    assert_eq!((map.len(), &index["metadata"]["total_size"]), (names.len(), &bytes.into()));
}

#[test]
fn an_overlay_gives_the_tensors_that_the_index_maps_to_it() {
    for (overlay, mapped, seed, disagree) in [
        // The last shard by name, and the first: loaders that read all shards take the last one.
        ("model-2.safetensors", "model-2.safetensors", 3, false),
        ("model-2.safetensors", "model-1.safetensors", 2, true),
        ("fix.safetensors", "./fix.safetensors", 3, true),
        ("sub/fix.safetensors", "sub/./fix.safetensors", 3, false),
    ] {
        let scratch = Scratch::new();
        let input = overlaid(&scratch, overlay, mapped);
        let checkpoint = Checkpoint::open(&input).unwrap();
        let read: Vec<_> = checkpoint.tensors().map(|tensor| (tensor.name, tensor.data)).collect();
        let (down, up) = (weight(DOWN, 1), weight(UP, seed));
        assert_eq!(checkpoint.tensor(UP).unwrap().data, up.bytes, "{mapped}");
        assert_eq!(read.len(), 3);
        assert!(read.contains(&(DOWN, &down.bytes)) && read.contains(&(UP, &up.bytes)));
        let warnings = checkpoint.warnings().join("\n");
        for part in [
            "names a shard \"./model-1.safetensors\"",
            &format!("1 tensors are in several shards, the first {UP}"),
            &format!("1 are left out, the first {GATE}"),
        ] {
            assert!(warnings.contains(part), "{warnings}");
        }
        assert_eq!(warnings.contains("take model.layers.0.mlp.up_proj.weight from"), disagree, "{warnings}");
    }
}

#[test]
fn outputs_have_each_tensor_once_and_a_right_index() {
    let scratch = Scratch::new();
    let input = overlaid(&scratch, "fix.safetensors", "fix.safetensors");
    let [packed, values, modelopt, parts] = ["Q", "D", "M", "P"].map(|name| scratch.path(name));
    quantize(&request(Format::Nvfp4), &input, &packed).unwrap();
    let open = |path: &Path| Checkpoint::open(path).unwrap();
    let dequantize = Dequantize { dtype: Some(Dtype::F32), ..Dequantize::default() };
    dequantize.run(&open(&packed), &values, &Device::Cpu, going_on()).unwrap();
    Convert::new(CheckpointFormat::Modelopt)
        .run(&open(&packed), &modelopt, &Device::Cpu, going_on())
        .unwrap();
    for index in [1, 2] {
        let part = Quantize { part: Some(Part { index, of: 2 }), ..request(Format::Nvfp4) };
        quantize(&part, &input, &parts).unwrap();
    }
    merge(&open(&input), &parts, going_on()).unwrap();
    assert_eq!(files(&parts), files(&packed));
    for out in [&packed, &values, &modelopt] {
        has_right_index(out);
        assert_eq!(open(out).warnings(), [""; 0]);
        let names: Vec<_> =
            logical(&open(out)).unwrap().iter().map(|tensor| tensor.name().to_string()).collect();
        assert_eq!(names.len(), 3, "{names:?}");
    }
    // The values are the mapped tensors': rounding to four bits loses about 20 dB.
    let comparison = compare(&open(&input), &open(&values), &Device::Cpu, going_on()).unwrap();
    assert!(comparison.tensors.len() == 3 && comparison.total.sqnr_db() > 15.0, "{comparison:?}");
}

#[test]
fn the_doctor_reports_tensors_that_loaders_of_whole_shards_take_from_elsewhere() {
    let scratch = Scratch::new();
    let defects = |path: &Path| {
        let found = diagnose(&Checkpoint::open(path).unwrap(), None, &Device::Cpu, going_on()).unwrap();
        found.findings.into_iter().map(|found| (found.defect.to_string(), found.tensor)).collect::<Vec<_>>()
    };
    let input = overlaid(&scratch, "fix.safetensors", "fix.safetensors");
    let found = defects(&input);
    assert_eq!(found, [("index", GATE), ("index", UP)].map(|(word, name)| (word.into(), Some(name.into()))));
    // The same bytes twice do no harm, and neither does an overlay that all loaders read last.
    write_file(&scratch, "IN/fix.safetensors", &[weight(UP, 2), weight(OUT, 6)]);
    assert_eq!(defects(&input), []);
    let other = Scratch::new();
    let input = overlaid(&other, "model-2.safetensors", "model-2.safetensors");
    write_file(&other, "IN/model-2.safetensors", &[weight(UP, 7), weight(OUT, 6)]);
    assert_eq!(defects(&input), []);
}

#[test]
fn a_tensor_that_is_in_another_shard_than_the_index_says_is_refused_by_name() {
    let scratch = Scratch::new();
    write_file(&scratch, "IN/a.safetensors", &[weight(DOWN, 1), weight(UP, 2)]);
    write_file(&scratch, "IN/b.safetensors", &[weight(GATE, 1)]);
    scratch.write_index("IN", &[(DOWN, "a.safetensors"), (UP, "b.safetensors"), (GATE, "b.safetensors")]);
    let error = Checkpoint::open(&scratch.path("IN")).unwrap_err();
    let Error::Directory(DirectoryError::NotInShard { tensor, shard, found, .. }) = &error else {
        panic!("{error}")
    };
    assert_eq!((tensor.as_str(), shard), (UP, &scratch.path("IN/b.safetensors")));
    assert_eq!(found.as_deref(), Some(&*scratch.path("IN/a.safetensors")));
    assert!(error.to_string().ends_with("a.safetensors, so correct the index"), "{error}");
}
