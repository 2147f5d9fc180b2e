//! Footers of VHD images (Microsoft's "Virtual Hard Disk Image Format Specification"). QEMU reads
//! an image that is a difference to a parent, but knows no parents: the copy would have holes.

/// Length of a footer, which is at the end of an image; one that is not fixed begins with a copy.
pub const VHD_FOOTER_BYTES: u64 = 512;
const COOKIE: &[u8] = b"conectix";
/// Offset of the disk's type.
const TYPE_AT: usize = 60;
const FIXED: u32 = 2;
const DYNAMIC: u32 = 3;
const DIFFERENCE: u32 = 4;

/// Checks that a VHD image is whole in its own file. `first` and `last`: its first and last 512
/// bytes.
///
/// # Errors
/// What is wrong with it.
pub fn check_vhd(first: &[u8], last: &[u8]) -> Result<(), String> {
    let mut types = [first, last].into_iter().filter_map(type_of).peekable();
    if types.peek().is_none() {
        return Err("not a VHD image: the footer is missing".to_owned());
    }
    types.try_for_each(|found| match found {
        FIXED | DYNAMIC => Ok(()),
        DIFFERENCE => Err("it is a differencing image: merge it into its parent first".to_owned()),
        other => Err(format!("it is a VHD image of the unknown type {other}")),
    })
}

fn type_of(footer: &[u8]) -> Option<u32> {
    let found = footer.get(TYPE_AT..TYPE_AT + 4)?.try_into().ok()?;
    footer.starts_with(COOKIE).then_some(u32::from_be_bytes(found))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn footer(kind: u32) -> Vec<u8> {
        let mut footer = COOKIE.to_vec();
        footer.resize(512, 0);
        footer[TYPE_AT..TYPE_AT + 4].copy_from_slice(&kind.to_be_bytes());
        footer
    }

    #[test]
    fn only_images_without_a_parent_are_whole() {
        let data = vec![7; 512];
        check_vhd(&data, &footer(FIXED)).unwrap();
        check_vhd(&footer(DYNAMIC), &footer(DYNAMIC)).unwrap();
        // Old programs write 511 bytes at the end.
        check_vhd(&footer(DYNAMIC), &footer(DYNAMIC)[1..]).unwrap();
        for (first, last) in [
            (footer(DIFFERENCE), footer(DIFFERENCE)),
            (footer(DIFFERENCE), footer(DYNAMIC)),
            (footer(DYNAMIC), footer(DIFFERENCE)),
        ] {
            assert!(check_vhd(&first, &last).unwrap_err().contains("parent"));
        }
        assert!(check_vhd(&data, &footer(9)).unwrap_err().contains("type 9"));
        assert!(check_vhd(&data, &data).is_err());
        assert!(check_vhd(b"conectix", &[]).is_err());
    }
}
