//! Devices.

use std::str::FromStr;

use microscale::{Device, DeviceChoice, Error};

use crate::streams::warn;

/// Parses a device, in any case.
pub(crate) fn parse_device(word: &str) -> Result<DeviceChoice, <DeviceChoice as FromStr>::Err> {
    word.to_lowercase().parse()
}

/// Makes a device ready. A GPU that fails is reported, a missing one is not.
pub(crate) fn device(choice: DeviceChoice) -> anyhow::Result<Device> {
    if choice != DeviceChoice::Auto {
        return Ok(Device::choose(choice)?);
    }
    let (device, refused) = Device::auto();
    if let Some(error @ Error::Gpu { .. }) = refused {
        warn(format_args!("the CPU is used, because {error}"));
    }
    Ok(device)
}

/// [`device`] for operations that dequantize.
///
/// `auto` means the CPU: copying values back from a GPU takes longer than computing them.
pub(crate) fn device_to_dequantize(choice: DeviceChoice) -> anyhow::Result<Device> {
    if choice == DeviceChoice::Auto { Ok(Device::Cpu) } else { device(choice) }
}
