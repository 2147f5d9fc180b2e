//! Rates, sizes, times and names in the forms used by people and peers.

use std::fmt::Display;
use std::str::FromStr;

use godwit_api::Endpoint;
use godwit_qemu::{ByteSize, MacAddress, RbdImage, read_ceph_key};
use godwit_types::{BitRate, Intent, RateLimit};
use godwit_wire::MigrationId;

pub fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    survives::<BitRate>(text);
    survives::<RateLimit>(text);
    survives::<ByteSize>(text);
    survives::<MacAddress>(text);
    survives::<MigrationId>(text);
    survives::<Endpoint>(text);
    survives::<Intent>(text);
    if let Some(image) = RbdImage::of(text.as_ref()) {
        assert_eq!(image.to_string(), text);
    }
    if let Ok(key) = read_ceph_key(text, "godwit") {
        assert!(!key.is_empty() && !key.contains(['\n', '[', ' ']), "{key:?}");
    }
}

fn survives<T: FromStr + Display + PartialEq + std::fmt::Debug>(text: &str) {
    if let Ok(read) = text.parse::<T>() {
        let written = read.to_string();
        let again = written.parse::<T>().ok();
        assert_eq!(again.as_ref(), Some(&read), "{text:?} was written as {written:?}");
    }
}
